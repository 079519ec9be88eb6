"""Autograd's functions with outputs of a GPipe; those with losses are in ``tests/contract``."""

import pytest
import torch
from torch import nn

from tests.support.helpers import Plain
from torchgpipe import GPipe

ROWS = 5


def layers():
    """Layers whose second derivative is not zero."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)
    ).double()


def compare(way, mode, device, chunks=(2,)):
    """Check that a function returns the same for a wrapped model and for the plain one."""
    for m in chunks:
        x = torch.randn(ROWS, 3, dtype=torch.double, device=device)
        expected = way(Plain(layers().to(device), m), x.clone().requires_grad_())
        wrapped = GPipe(layers(), [1, 4, 1], devices=[device] * 3, chunks=m, checkpoint=mode)
        found = way(wrapped, x.clone().requires_grad_())
        assert any(value.any() for value in expected)
        torch.testing.assert_close(found, expected)


def grads(model, *others):
    return [leaf.grad for leaf in [*others, *model.parameters()]]


def test_gradient_of_the_output_that_is_given(mode, device):
    def way(model, x):
        output = model(x)
        output.backward(torch.linspace(-1, 1, output.numel(), device=device).view_as(output))
        return grads(model, x)

    compare(way, mode, device)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3), slice(-1, None)], ids=str)
def test_loss_of_some_rows(rows, mode, device):
    def way(model, x):
        model(x)[rows].square().sum().backward()
        return grads(model, x)

    compare(way, mode, device, chunks=(2, 5))


def test_gradcheck(mode):
    """Finite differences, with undefined gradients, and with batches of gradients."""
    model = GPipe(layers(), [3, 3], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(model, x, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(model, x, check_batched_grad=True, fast_mode=True)
