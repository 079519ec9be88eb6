"""Checkpointing: recomputation in backward, with the gradients and graph of the plain function."""

import pytest
import torch
from torch import nn

from tests.support.helpers import Log
from tests.support.recomputation import checkpoint
from torchgpipe import is_recomputing


def layers(device):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()
    ).to(device)


@pytest.fixture
def model(device):
    return layers(device)


@pytest.fixture
def input(device):
    return torch.randn(3, 4, device=device, requires_grad=True)


def test_gradients_are_the_same(model, input):
    leaves = [input, *model.parameters()]
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(input).sum(), leaves)
    torch.manual_seed(1)
    output = checkpoint(model, input)
    actual = torch.autograd.grad(output.sum(), leaves)
    for a, b in zip(expected, actual):
        assert torch.equal(a, b)


def test_recomputes_before_the_gradient_goes_on():
    log = []
    model = nn.Sequential(Log("a", log), Log("b", log))
    y = checkpoint(model, torch.ones(1, requires_grad=True))
    y = Log("after", log)(y)
    y.backward()
    assert [entry[:2] for entry in log] == [
        ("forward", "a"),
        ("forward", "b"),
        ("forward", "after"),
        ("backward", "after"),
        ("forward", "a"),
        ("forward", "b"),
        ("backward", "b"),
        ("backward", "a"),
    ]


def test_recomputes_once_with_retain_graph(input, model):
    runs = []
    output = checkpoint(lambda x: runs.append(1) or model(x), input)
    (first,) = torch.autograd.grad(output.sum(), input, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), input)
    assert torch.equal(first, second)
    assert len(runs) == 2
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), input)


def test_nothing_to_differentiate_is_not_recomputed(device):
    runs = []
    output = checkpoint(lambda x: runs.append(1) or x * 2, torch.ones(1, device=device))
    assert not output.requires_grad
    assert len(runs) == 1


def test_cpu_generator_is_not_asked_for_where_it_was_not_used(device, monkeypatch):
    """Several accelerators can therefore recompute side by side."""
    locks = {}
    monkeypatch.setattr("torchgpipe.ambient.generators._locks", locks)
    x = torch.ones(2, device=device, requires_grad=True)
    checkpoint(lambda x: x * x, x).sum().backward()
    assert not locks
    checkpoint(lambda x: x * torch.rand(2).to(x.device), x).sum().backward()
    assert [*locks] == [torch.device("cpu")]


def test_draws_to_the_end(device):
    """A recomputation that draws goes on to its end, so that its numbers can be compared."""
    log = []

    def function(x):
        y = x.exp()
        log.append(torch.rand(2, device=device))
        return y

    checkpoint(function, torch.ones(2, device=device, requires_grad=True)).sum().backward()
    assert torch.equal(*log)


def test_backward_within_forward_is_an_error(device):
    def function(x):
        (grad,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        return grad

    x = torch.ones(1, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot run backward within its own forward"):
        checkpoint(function, x)


def test_failed_recomputation(device):
    def function(x):
        if is_recomputing():
            raise KeyError("again")
        return x.exp()

    output = checkpoint(function, torch.ones(1, device=device, requires_grad=True))
    with pytest.raises(KeyError, match="again"):
        output.backward()
    assert not is_recomputing()
    with pytest.raises(RuntimeError, match="after a recomputation has failed"):
        output.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_other_checkpointing_within(device, model, input, use_reentrant):
    def function(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)

    leaves = [input, *model.parameters()]
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(input).sum(), leaves)
    torch.manual_seed(1)
    checkpoint(function, input).sum().backward()
    for a, b in zip(expected, leaves):
        assert torch.equal(a, b.grad)
