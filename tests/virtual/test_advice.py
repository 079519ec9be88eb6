"""Advice on badly set models names the figure and the setting, and what it says helps."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import assert_graphs
from tests.support.planning import Timed, links, random_layers
from tests.support.size import some
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, _torch, trace
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine import workers
from torchgpipe.testing import observe

ROWS = 16


@pytest.fixture(autouse=True)
def issued_by_the_caller(monkeypatch):
    """Have one thread issue all: where several do, nobody can tell what a late host costs."""
    monkeypatch.setattr(workers, "ASLEEP", math.inf)
    monkeypatch.setattr(workers, "has_streams", has_streams)


def layers_of(times):
    return nn.Sequential(*[Timed(nn.Tanh(), (x, x, x)) for x in times])


class Waiting(Timed):
    """A layer that waits for its device."""

    def forward(self, input):
        output = super().forward(input)
        return output * 2 if output.sum().item() > 1e6 else output


#: By name: the layers, how they are wrapped, the schedule, what is observed, and what is advised.
CASES = {
    "bad cut": (
        layers_of([0.5] * 8),
        {"balance": [4, 2, 1, 1], "chunks": 8, "checkpoint": "except_last"},
        None,
        {},
        "virtual:0 computes 93% longer than the mean: take the balance of balance.balance_by_time("
        "4, model.module, sample)",
    ),
    "too few micro-batches": (
        layers_of([0.5] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 2, "checkpoint": "never"},
        "1f1b",
        {},
        "devices wait 60% of the step, with 2 micro-batches: try chunks=4",
    ),
    "too many for the host": (
        layers_of([0.001] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 16, "checkpoint": "never"},
        "1f1b",
        {"host": 0.02},
        "devices wait for the host 76% of the step: try chunks=8",
    ),
    "needless recomputation": (
        layers_of([0.5] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 8, "checkpoint": "always"},
        "1f1b",
        {},
        "devices compute again for 20% of the step: try checkpoint='never'",
    ),
    "no rows left": (
        layers_of([0.5] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 4, "checkpoint": "never"},
        None,
        {"rows": 4},
        "devices wait 44% of the step, with 4 micro-batches: call it once with the rows of several "
        "mini-batches",
    ),
    "layers that wait under a schedule": (
        nn.Sequential(*[Waiting(nn.Tanh(), (0.5, 0.5, 0.5)) for _ in range(8)]),
        {"balance": [2, 2, 2, 2], "chunks": 8, "checkpoint": "never"},
        "1f1b",
        {},
        "of the step, in .item() in test_advice.py, line 38: ask for no values in forward",
    ),
    "layers that wait": (
        nn.Sequential(*[Waiting(nn.Tanh(), (0.5, 0.5, 0.5)) for _ in range(8)]),
        {"balance": [2, 2, 2, 2], "chunks": 8, "checkpoint": "never"},
        None,
        {},
        "of the step, in .item() in test_advice.py, line 38: ask for no values in forward",
    ),
}


def traced(devices, case, change):
    """The timeline of a step, with some settings changed."""
    layers, options, schedule, observed, _ = CASES[case]
    model = GPipe(copy.deepcopy(layers), devices=devices[:4], **{**options, **change})
    observed = {**observed}
    rows = observed.pop("rows", ROWS)
    x, y = torch.rand(rows, 4, device=devices[0]), torch.rand(rows, 4, device=devices[3])
    if schedule is not None:
        model = ScheduledLoss(model, F.mse_loss, schedule)

    def step():
        return F.mse_loss(model(x), y) if schedule is None else model(x, y)

    step().backward()
    with observe(**observed), trace(model) as timeline:
        step().backward()
    return timeline


@pytest.mark.parametrize("case", CASES)
def test_advice(devices, case):
    before = traced(devices, case, {})
    advice = before.advice
    assert CASES[case][-1] in str(advice)
    assert str(before).endswith(str(advice))
    if advice.change:
        assert traced(devices, case, advice.change).makespan < before.makespan


def test_nothing_is_said_of_what_is_well_set(devices):
    layers, x = layers_of([0.5] * 8), torch.rand(ROWS, 4, device=devices[0])
    model = GPipe(layers, [2] * 4, devices=devices[:4], chunks=ROWS, checkpoint="never")
    with observe(), trace(model) as timeline:
        model(x).sum().backward()
    assert timeline.advice is None
    assert timeline.step().advice is None


def test_graphs_stay_graphs(devices):
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    model = GPipe(layers, [4, 2], devices=devices[:2], chunks=4, checkpoint="never")
    training = ScheduledLoss(model, F.mse_loss, stages="graph")
    x, y = torch.rand(8, 4, device=devices[0]), torch.rand(8, 4, device=devices[1])
    training(x, y).backward()
    with observe(costs={"addmm": 1, "mm": 1}), trace(training) as timeline:
        training(x, y).backward()
    assert_graphs(training)
    assert "balance_by_time" in str(timeline.advice)


def test_a_device_that_is_too_small(devices, monkeypatch):
    """The memory that cells have kept tells which mode does not fit into the device."""
    torch.manual_seed(0)
    times = (0.1,) * 3
    layers = [Timed(nn.Sequential(nn.Linear(64, 64), nn.GELU()), times) for _ in range(4)]
    model = GPipe(
        nn.Sequential(*layers), [2, 2], devices=devices[:2], chunks=8, checkpoint="always"
    )
    training = ScheduledLoss(model, F.mse_loss, "fill_drain")
    x, y = torch.rand(256, 64, device=devices[0]), torch.rand(256, 64, device=devices[1])

    def advised(total):
        monkeypatch.setattr("torchgpipe.planner.advice.memory_total", lambda _: total)
        with observe(bandwidth=links(devices)), trace(training) as timeline:
            training(x, y).backward()
        return timeline

    used = max(advised(math.inf).memory.values())
    told = advised(math.inf).advice
    assert told.change == {"checkpoint": "never"}
    assert "more activations are kept; virtual:" in told.caution
    assert advised(1.5 * used).advice.change == {"checkpoint": "except_last"}
    advice = advised(used).advice
    assert advice is None or "checkpoint" not in advice.change


def test_cells_that_leave_over_slow_links(devices):
    x, y = torch.rand(512, 128, device=devices[0]), torch.rand(512, 128, device=devices[1])
    layers = random_layers(5, 4, 128)
    model = GPipe(layers, [2, 2], devices=devices[:2], chunks=8, checkpoint="offload")
    for _ in range(2):
        with observe(bandwidth=links(range(8), host=2e4)), trace(model) as timeline:
            F.mse_loss(model(x), y).backward()
    assert timeline.advice.change == {"checkpoint": "never"}
    assert timeline.advice.reason.startswith("copies of cells to the host, and back, take")


def mapped(layers, devices, sizes, **options):
    names = iter(range(len(layers)))
    places = {str(next(names)): x for x, size in zip(devices, sizes) for _ in range(size)}
    return MappedGPipe(copy.deepcopy(layers), places, **{"checkpoint": "never", **options})


def advice_on(model, devices):
    x = torch.rand(ROWS, 4, device=devices[0])
    for _ in range(2):
        model(x).sum().backward()
    with observe(), trace(model) as timeline:
        model(x).sum().backward()
    return timeline


def test_maps(devices):
    model = mapped(layers_of([0.5] * 6), devices, [4, 2], chunks=8)
    advice = advice_on(model, devices).advice
    assert "29% longer than the mean: take the balance of balance.map_by_time(" in str(advice)
    model = mapped(CASES["layers that wait"][0], devices, [2] * 4, chunks=8)
    before = advice_on(model, devices)
    assert before.advice.change == {"threads": 4}
    assert "in .item()" in before.advice.reason
    model.threads = 4
    assert advice_on(model, devices).makespan < 0.8 * before.makespan


class Drawing(Waiting):
    """A layer that waits, and draws on the CPU, so one thread computes all micro-batches."""

    def forward(self, input):
        return super().forward(input) * (1 + 1e-9 * torch.rand(1).item())


@pytest.mark.parametrize("threads", some([1, 4], [1]))
def test_threads_are_not_said_where_they_do_not_help(devices, threads):
    layers = nn.Sequential(*[Drawing(nn.Tanh(), (0.5, 0.5, 0.5)) for _ in range(4)])
    model = mapped(layers, devices, [1] * 4, chunks=ROWS, threads=threads)
    advice = advice_on(model, devices).advice
    assert advice is None or "threads" not in advice.change


def test_the_model_is_left_alone(devices):
    model = mapped(layers_of([0.5] * 4), devices, [3, 1], chunks=2)
    before = copy.copy(model._forward_pre_hooks)
    with pytest.raises(ValueError, match="no"), trace(model):
        model(torch.rand(4, 4, device=devices[0]))
        raise ValueError("no")
    assert model._forward_pre_hooks == before
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())
    assert _torch.count_function_modes() == 0
