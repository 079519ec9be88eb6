"""Samples become the arguments of a call."""

from collections import UserDict

import pytest
import torch

from torchgpipe import arguments
from torchgpipe.planner.given import arguments_of

X = torch.rand(2, 3)


@pytest.mark.parametrize(
    ("sample", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 2), (X, 2), {}),
        (([X],), ([X],), {}),
        ({"x": X}, (), {"x": X}),
        (UserDict(x=X), (), {"x": X}),
        (arguments(X, scale=2), (X,), {"scale": 2}),
    ],
    ids=["tensor", "tuple", "list in a tuple", "dict", "mapping", "arguments"],
)
def test_samples(sample, args, kwargs):
    assert arguments_of(sample) == (args, kwargs)


def test_others():
    with pytest.raises(TypeError, match=r"sample: .*\); pass a single argument .* \(argument,\)"):
        arguments_of([X])
    with pytest.raises(TypeError, match=r"keyword arguments, .*sample: \{1: 2\}\); pass"):
        arguments_of({1: 2})
