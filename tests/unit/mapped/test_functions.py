"""Functions that change their first argument are known by their names."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.mapped.functions import STATISTICS, is_in_place


@pytest.mark.parametrize(
    "function",
    [Tensor.add_, Tensor.__iadd__, Tensor.__setitem__, torch.relu_, Tensor.requires_grad_],
)
def test_functions_that_change_something(function):
    assert is_in_place(function.__name__)


@pytest.mark.parametrize(
    "function", [Tensor.add, Tensor.__add__, Tensor.__invert__, Tensor.__getitem__, F.relu]
)
def test_functions_that_change_nothing(function):
    assert not is_in_place(function.__name__)


def test_statistics():
    """The second argument of these is what they change."""
    mean, var = torch.zeros(3), torch.ones(3)
    for name in STATISTICS:
        getattr(F, name)(torch.rand(4, 3, 2) + 1, mean, var, momentum=0.5, **WAYS[name])
        assert mean.min() > 0
        mean.zero_()


WAYS = {"batch_norm": {"training": True}, "instance_norm": {"use_input_stats": True}}
