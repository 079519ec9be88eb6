"""Stages that are graphs see whatever changes between their steps, or within one."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.graphs import is_computing
from tests.support.helpers import assert_graphs
from tests.support.schedules import Case, training_of
from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.graphs.gate import gate


class Split(nn.Module):
    """A layer with two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.a(x)
        return y, self.b(y)


class First(nn.Module):
    """A layer that needs one of two inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x[0])


def grads_of(training, *steps):
    """The gradients of all parameters after some steps."""
    for input, target in steps:
        training(input, target).backward()
    return [p.grad for p in training.parameters()]


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_gradients_of_some_outputs_under_autocast(name):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Split(), First(), nn.Linear(6, 6)]
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    found = []
    for stages in ("eager", "graph"):
        options = {"stages": stages}
        training = training_of(case, copy.deepcopy(layers), name, ["cpu"] * 4, "never", **options)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(grads_of(training, (case.input, case.target)))
    assert_graphs(training)
    for a, b in zip(*found):
        assert (a is None and b is None) or torch.equal(a, b)


def test_gradients_of_some_outputs_after_weights_were_replaced():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Split(), First(), nn.Linear(6, 6)]
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(case, layers, "1f1b", ["cpu"] * 4, "never", stages="graph")
    with torch.no_grad():
        # Traced, but for its backward.
        training(case.input, case.target)
    training(case.input, case.target)
    old = weakref.ref(layers[1].a.weight)
    layers[1].a.weight = nn.Parameter(torch.rand(6, 6))
    training.zero_grad()
    found = grads_of(training, (case.input, case.target))
    training.zero_grad()
    F.mse_loss(nn.Sequential(*layers)(case.input), case.target).backward()
    for a, p in zip(found, training.parameters()):
        assert (a is None and p.grad is None) or torch.allclose(a, p.grad, atol=1e-6)
    gc.collect()
    assert old() is None


class Asking(nn.Module):
    """A layer that computes something else where it is checkpointed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        checkpointed = is_checkpointing() or is_recomputing()
        return self.layer(x) * (2 if checkpointed else 3)


def test_layers_that_ask_whether_they_are_checkpointed():
    torch.manual_seed(0)
    layers = [Asking() for _ in range(4)]
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    found = []
    for stages in ("eager", "graph"):
        options = {"stages": stages}
        training = training_of(
            case, copy.deepcopy(layers), "1f1b", ["cpu"] * 4, "always", **options
        )
        found.append(grads_of(training, (case.input, case.target)))
    assert_graphs(training)
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_ways_to_compute_that_are_chosen_later():
    case = Case([nn.Linear(6, 6) for _ in range(4)], torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(case, case.layers, "1f1b", ["cpu"] * 4, "never")
    training(case.input, case.target)
    assert not training.graphs
    training.stages = "graph"
    training(case.input, case.target)
    assert_graphs(training)
    training.stages = "eager"
    training(case.input, case.target)
    assert not training.graphs
    with pytest.raises(ValueError, match="'eager' or 'graph'"):
        training.stages = "fx"


class Scaling(nn.Module):
    """A layer whose backward needs a buffer."""

    def __init__(self, mean, changing):
        super().__init__()
        self.layer, self.changing = nn.Linear(6, 6), changing
        self.register_buffer("mean", mean)

    def forward(self, x):
        if self.changing:
            self.mean.add_(1)
            return self.layer(x)
        return self.layer(x) * self.mean


@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_buffer_that_another_stage_changes(stages):
    mean = torch.ones(6)
    layers = [Scaling(mean, False), Scaling(mean, True), nn.Linear(6, 6), nn.Linear(6, 6)]
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(case, layers, "1f1b", ["cpu"] * 4, "never", stages=stages)
    with torch.no_grad():
        training(case.input, case.target)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        for _ in range(2):
            training(case.input, case.target)


class Seen(torch.autograd.Function):
    """A function that takes note of what runs, and of whether nobody may trace meanwhile."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        found.add(("R" if is_recomputing() else "F", is_computing(gate)))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.found.add(("B", is_computing(gate)))
        return grad, None


class Looking(nn.Module):
    """A layer that is computed by an eager cell, and looks at what runs."""

    def __init__(self, found):
        super().__init__()
        self.layer, self.found = nn.Linear(6, 6), found

    def forward(self, x):
        return Seen.apply(self.layer(x), self.found).sin()


@pytest.mark.filterwarnings("ignore:a stage must be traceable")
@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_nobody_traces_while_an_eager_cell_computes(name):
    found = set()
    layers = [Looking(found), *[nn.Linear(6, 6) for _ in range(3)]]
    layers[0].register_forward_hook(lambda *_: None)
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    grads_of(
        training_of(case, layers, name, ["cpu"] * 4, "always", stages="graph"), *[case[1:3]] * 3
    )
    assert found == {(kind, True) for kind in "FRB"}
