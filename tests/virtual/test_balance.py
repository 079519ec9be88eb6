"""Balancing by time on virtual accelerators, where only what has a cost takes time."""

import pytest
import torch
from torch import nn

from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.testing import observe


def linears():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])


def test_no_layer_takes_time(devices):
    x = torch.rand(2, 4)
    with pytest.raises(ValueError, match=r"device: virtual:0, times: 0 for all 8 layers.*costs="):
        balance_by_time(4, linears(), x, timeout=0)
    assert balance_by_time(4, linears(), x, timeout=0.1, device="cpu") is not None
    assert balance_by_size(4, linears(), x) == [2, 2, 2, 2]


def test_layers_with_costs(devices):
    """The remedy that the error names."""
    with observe(costs={"addmm": 1.0, "mm": 1.0}):
        assert balance_by_time(4, linears(), torch.rand(2, 4), timeout=0) == [2, 2, 2, 2]
