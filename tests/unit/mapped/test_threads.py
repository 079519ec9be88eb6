"""Attributes that forward must not set; what threads compute is tested on virtual accelerators."""

import pytest
import torch
from torch import nn

from torchgpipe.mapped.threads import unset


def test_attributes():
    model = nn.Sequential(nn.Linear(2, 2))
    with unset(model.named_modules()):
        model(torch.rand(1, 2))
        model[0].weight.grad = torch.zeros(2, 2)
    error = pytest.raises(RuntimeError, match=r"module: 0, set: \['kept'\]")
    with error, unset(model.named_modules()):
        model[0].kept = 1
    error = pytest.raises(RuntimeError, match=r"module: the model, set: \['training'\]")
    with error, unset(model.named_modules()):
        model.training = False


def test_an_error_of_the_block_is_not_replaced():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="own"), unset(model.named_modules()):
        model.kept = 1
        raise ValueError("own")
