"""Stages that are graphs compute what their layers do, under any schedule."""

import copy
import functools

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_graphs
from tests.support.schedules import CASES, NAMES, Case, compare, training_of
from tests.support.size import SOAK

#: Virtual accelerators run all of them in each run.
TRACED = [x for x in CASES if x != "deferred norms"]
SOME = TRACED if SOAK else ["skips", "convolutions and norms"]
SCHEDULES = NAMES if SOAK else ["zbh1"]


def noisy():
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.LayerNorm(6)) for _ in range(3)]
    return Case(layers, torch.rand(7, 6), torch.rand(7, 6), 3)


def bits(training, case):
    """Everything that some steps compute."""
    torch.manual_seed(3)
    x = case.input.clone().requires_grad_(case.input.is_floating_point())
    found = []
    for _ in range(2):
        loss = training(x, *(case.target if isinstance(case.target, tuple) else [case.target]))
        loss.backward()
        found.append(loss.detach())
    found += [*training.parameters(), *training.buffers()]
    found += [y.grad for y in [x, *training.parameters()] if y.grad is not None]
    return [*found, torch.get_rng_state()]


BITS = {"dropout": noisy}
if SOAK:
    BITS |= {name: CASES[name] for name in ("convolutions and norms", "transformer")}


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
@pytest.mark.parametrize("case", BITS)
def test_bits(case, name, mode):
    """Compare all bits, and all random numbers."""
    torch.manual_seed(0)
    case = BITS[case]()
    found = []
    for stages in ("eager", "graph"):
        layers = copy.deepcopy(case.layers)
        training = training_of(case, layers, name, ["cpu"] * 4, mode, stages=stages)
        found.append(bits(training, case))
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found):
        assert torch.equal(a, b)


class Average(nn.Module):
    """A layer whose average is read before it is changed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        y = self.layer(x) - self.average
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y.tanh()


def test_buffers_that_are_read_and_changed(mode):
    torch.manual_seed(0)
    case = Case([Average() for _ in range(2)], torch.rand(8, 6), torch.rand(8, 6))
    training = compare(case, "1f1b", ["cpu"] * 4, mode, stages="graph")
    assert_graphs(training)


class Wide(nn.Module):
    """A layer that leaves autocast."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


def test_layers_that_leave_autocast():
    torch.manual_seed(0)
    case = Case([Wide() for _ in range(2)], torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(
        case, case.layers, "1f1b", ["cpu"] * 4, "never", stages="graph", outputs=True
    )
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):
            _, output = training.eval()(case.input, case.target)
    assert output.dtype == torch.float32


class Doubling(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_inputs_that_change_in_place(name):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), Doubling(), nn.Linear(6, 6)]
    x, y = torch.rand(8, 6), torch.rand(8, 6)
    case = Case(layers, x, y)
    training = compare(case, name, ["cpu"] * 4, "never", stages="graph")
    assert_graphs(training)


def test_eager_stage_that_changes_what_a_graph_needs():
    changing = []

    class Value(nn.Module):
        def forward(self, x):
            return x.mul_(2) if x.sum() > -99 and changing else x

    layers = [nn.Linear(6, 6), nn.Tanh(), Value(), nn.Linear(6, 6)]
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(case, layers, "1f1b", ["cpu"] * 4, "never", stages="graph")
    with pytest.warns(UserWarning, match="stage 2"):
        training(case.input, case.target)
    changing.append(1)
    with pytest.raises(RuntimeError, match=r"clone it first"):
        training(case.input, case.target)


class Halving(torch.autograd.Function):
    """The input as a view of itself, with half of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Twice(nn.Module):
    def forward(self, x):
        return Halving.apply(x), x


class Apart(nn.Module):
    def forward(self, pair):
        return pair[0] ** 2 + 3 * pair[1] ** 3


@pytest.mark.filterwarnings("ignore:.*share memory")
def test_an_input_that_is_handed_on_twice():
    layers = [nn.Linear(6, 6), Twice(), Apart(), nn.Linear(6, 6)]
    compare(
        Case(layers, torch.rand(8, 6), torch.rand(8, 6)),
        "1f1b",
        ["cpu"] * 4,
        "never",
        stages="graph",
    )


@functools.lru_cache
def table(size):
    """Make something once, and keep it."""
    return torch.arange(size, dtype=torch.float32)


def test_layers_that_keep_what_they_have_made():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x) + table(6)

    case = Case([Cached() for _ in range(2)], torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(case, case.layers, "1f1b", ["cpu"] * 4, "never", stages="graph")
    table.cache_clear()
    with pytest.warns(UserWarning, match="not among its parameters"):
        training(case.input, case.target)
    assert type(table(6)) is torch.Tensor


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("case", SOME)
def test_recomputation_by_a_min_cut(case, name, mode):
    torch.manual_seed(0)
    options = {"stages": "graph", "recompute": "min-cut"}
    training = compare(CASES[case](), name, ["cpu"] * 4, mode, **options)
    assert_graphs(training)


def test_random_numbers_of_a_min_cut():
    torch.manual_seed(0)
    case = noisy()
    found = []
    for options in ({"stages": "eager"}, {"stages": "graph", "recompute": "min-cut"}):
        layers = copy.deepcopy(case.layers)
        training = training_of(case, layers, "1f1b", ["cpu"] * 4, "always", **options)
        found.append(bits(training, case))
    for a, b in zip(*found):
        assert torch.equal(a, b)
