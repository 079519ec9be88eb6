"""A stand-in for a collective computes nothing, forward and backward."""

import torch

from benchmarks.simulate.exchange import Exchange


def test_exchange():
    x = torch.rand(3, requires_grad=True)
    y = Exchange(1.0, 2.0)(x)
    assert torch.equal(x, y)
    assert y is not x
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
