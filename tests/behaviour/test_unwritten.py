"""Operators that hand a tensor to autograd before they write to it, under checkpointing."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import Apply, plain, wrap


@contextmanager
def fresh_memory_is_nan():
    """Fill memory that nobody has written with NaN, so that reading it is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def frozen():
    """A layer that saves its weight, and not its input, which a recomputation need not compute."""
    return nn.Linear(2, 2).requires_grad_(False)


#: The layers behind the first one. The noise is dropped last, or right before the input.
LAYERS = {
    "module": lambda: [nn.RReLU(), frozen()],
    "function": lambda: [Apply(lambda x: F.rrelu(x, training=True)), frozen()],
    "in place": lambda: [nn.RReLU(inplace=True), frozen()],
    "twice": lambda: [nn.RReLU(), nn.RReLU(), frozen(), frozen()],
    "one layer": lambda: [nn.Sequential(nn.Tanh(), nn.RReLU(), frozen())],
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_noise_of_rrelu(name, mode, device):
    """Without a negative input, the layer draws no numbers, and fills its noise with ones."""
    torch.manual_seed(0)
    module = nn.Sequential(Apply(torch.square), *LAYERS[name]()).to(device)
    model = wrap(copy.deepcopy(module), device, mode, balance=[len(module)])
    x = torch.rand(6, 2, device=device) + 0.1
    found = []
    for run in (lambda x: plain(module, x, 3), model):
        leaf = x.clone().requires_grad_()
        with fresh_memory_is_nan():
            run(leaf).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
