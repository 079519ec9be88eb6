"""Values, losses and gradients."""

import torch
from torch import nn

from tests.contract.promises import promise
from tests.contract.wrapped import assert_same_grads, linears, plain_step


def batch(rows, model, size=6):
    """An input and a target."""
    x, y = torch.rand(2, rows, size)
    return x, y, x.to(model.first), y.to(model.last)


@promise(
    "Outputs, losses and gradients are those of the plain model, step after step.",
    modes=True,
    devices=True,
)
def parity(make):
    layers = linears(6, 8, 6)
    model = make(layers)
    for _ in range(3):
        x, y, *moved = batch(8, model)
        expected = plain_step(layers, x, y)
        torch.testing.assert_close(model.step(*moved).cpu(), expected)
        torch.testing.assert_close(model.forward(moved[0]).detach().cpu(), layers(x).detach())
        assert_same_grads(model, layers)


@promise("A mini-batch may have any number of rows, also fewer than micro-batches.", modes=True)
def any_rows(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    for rows in (7, 3, 1, 8):
        x, y, *moved = batch(rows, model)
        expected = plain_step(layers, x, y)
        torch.testing.assert_close(model.step(*moved).cpu(), expected)
        assert_same_grads(model, layers)


@promise("Layers that require no gradient get none.", modes=True)
def frozen(make):
    layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    layers[0].requires_grad_(False)
    layers[2].requires_grad_(False)
    model = make(layers)
    x, y, *moved = batch(8, model)
    plain_step(layers, x, y)
    model.step(*moved)
    assert_same_grads(model, layers)
