"""Gradients are summed up, and handed over once, without a second copy."""

import pytest
import torch
from torch import nn

from torchgpipe.devices.streams import CPU, CPUStream
from torchgpipe.engine import outcome
from torchgpipe.engine.outcome import HandOver, Outcome, Sums

CALLER = CPUStream(CPU)


def loss_of(sums, *tensors, divisor=None):
    zero = HandOver.apply(sums, CPU, torch.float32, CALLER, *tensors)
    return Outcome.apply(torch.tensor(3.0), divisor, zero)


def test_sums_that_share_memory():
    weight, other, shared = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3)), torch.rand(3)
    expected = shared.clone()
    for count in (1, 2, 3):
        sums = Sums()
        for _ in range(count):
            sums.add([weight, other], [shared, shared])
        weight.grad = other.grad = None
        (loss_of(sums, weight, other) * 0.5).backward()
        torch.testing.assert_close(weight.grad, expected * count / 2)
        torch.testing.assert_close(other.grad, expected * count / 2)


class Constant(torch.autograd.Function):
    """A function whose backward returns the same tensor each time."""

    grad = torch.rand(3)

    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return Constant.grad


def test_gradients_added_at_once(monkeypatch):
    weight, other = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(2))
    monkeypatch.setattr(outcome, "LARGE", weight.nbytes)
    before = Constant.grad.clone()
    sums = Sums()
    with sums.adding_at_once([weight, other]):
        for k in range(4):
            sums.ready()
            loss = Constant.apply(weight) + (other * k).sum()
            found = torch.autograd.grad(loss, [weight, other])
            # The gradient itself is free for the next one.
            assert (found[0] is sums._sums.get(id(weight))) == (k > 0)
            assert (found[1] is sums._sums.get(id(other))) == (k > 0)
            sums.add([weight, other], found)
    assert not weight._backward_hooks
    loss_of(sums, weight, other).backward()
    torch.testing.assert_close(weight.grad, 4 * before)
    torch.testing.assert_close(other.grad, torch.full((2,), 6.0))
    assert torch.equal(Constant.grad, before)


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [("meta", [3, 2], [3]), ("cpu", [3, 2], [3, 2]), ("cpu", [2, 1], [])],
)
def test_small_gradients_wait_but_beside_large_ones_on_the_cpu(monkeypatch, kind, sizes, expected):
    monkeypatch.setattr(outcome, "LARGE", 12)
    weights = [nn.Parameter(torch.rand(size, device=kind)) for size in sizes]
    sums = Sums()
    with sums.adding_at_once(weights):
        sums.ready()
        assert not any(x._backward_hooks for x in weights)
        sums.add(weights, [torch.empty_like(x) for x in weights])
        sums.ready()
        assert [len(x) for x in weights if x._backward_hooks] == expected


def test_sparse_gradients(monkeypatch):
    monkeypatch.setattr(outcome, "LARGE", 1)
    table = nn.Embedding(5, 2, sparse=True)
    terms = []
    sums = Sums()
    with sums.adding_at_once([table.weight]):
        for k in range(3):
            sums.ready()
            loss = table(torch.tensor([k, k + 1])).sum()
            terms += torch.autograd.grad(loss, [table.weight])
            sums.add([table.weight], terms[-1:])
    (loss_of(sums, table.weight) * 2).backward()
    assert table.weight.grad.is_sparse
    expected = 2 * sum(term.to_dense() for term in terms)
    torch.testing.assert_close(table.weight.grad.to_dense(), expected)
