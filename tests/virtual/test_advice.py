"""Advice on badly set models, followed, gains what it says."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import assert_graphs
from tests.support.planning import Timed
from tests.support.size import some
from torchgpipe import GPipe, ScheduledLoss, trace
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine import workers
from torchgpipe.testing import observe


class Wide(nn.Module):
    """A layer that hands on more, or fewer, numbers than it is given."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, input):
        return input.repeat(1, self.width) if self.width > 1 else input[:, :4]


def layers_of(times):
    return nn.Sequential(*[Timed(nn.Tanh(), (x, x, x)) for x in times])


def widening():
    """Layers of which the fifth is small, and is given a lot."""
    layers = layers_of([0.5] * 4 + [0.02] + [0.5] * 3)
    layers[3] = nn.Sequential(layers[3], Wide(16))
    layers[4] = nn.Sequential(Wide(1), layers[4])
    return layers


#: By name: the layers, how they are wrapped, the schedule, what is observed, and what is advised.
CASES = {
    "bad cut of GPipe": (
        layers_of([0.5] * 8),
        {"balance": [4, 2, 1, 1], "chunks": 8, "checkpoint": "except_last"},
        None,
        {},
        {"balance": [2, 2, 2, 2]},
    ),
    "too few micro-batches": (
        layers_of([0.5] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 2, "checkpoint": "never"},
        "1f1b",
        {},
        {"chunks": 16},
    ),
    "too many for the host": (
        layers_of([0.001] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 16, "checkpoint": "never"},
        "1f1b",
        {"host": 0.02},
        {"chunks": 8},
    ),
    "needless recomputation": (
        layers_of([0.5] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 8, "checkpoint": "always"},
        "1f1b",
        {},
        {"checkpoint": "never"},
    ),
    "slow link": (
        widening(),
        {"balance": [2, 2, 2, 2], "chunks": 8, "checkpoint": "never"},
        None,
        {"bandwidth": {(a, b): 20.0 for a in range(8) for b in range(8) if a != b}},
        {"balance": [2, 3, 1, 2]},
    ),
    "wrong schedule": (
        layers_of([0.5] * 8),
        {"balance": [2, 2, 2, 2], "chunks": 8, "checkpoint": "never"},
        "1f1b",
        {},
        {"schedule": "zero_bubble_h1"},
    ),
}
ROWS = 16


def traced(devices, case, change):
    """The timeline of a step, with some settings changed."""
    layers, options, schedule, observed, _ = CASES[case]
    options = {**options, **{k: x for k, x in change.items() if k != "schedule"}}
    model = GPipe(copy.deepcopy(layers), devices=devices[:4], **options)
    x, y = torch.rand(ROWS, 4, device=devices[0]), torch.rand(ROWS, 4, device=devices[3])
    if schedule is not None:
        model = ScheduledLoss(model, F.mse_loss, change.get("schedule", schedule))

    def step():
        return F.mse_loss(model(x), y) if schedule is None else model(x, y)

    step().backward()
    with observe(**observed), trace(model) as timeline:
        step().backward()
    return timeline


# Others stand in tests of maps, and in docs/speed.rst.
@pytest.mark.parametrize("case", some([*CASES], [*CASES][2:]))
def test_advice_that_is_followed(devices, case, monkeypatch):
    # Where several threads issue, nobody can tell what a host that is late costs.
    monkeypatch.setattr(workers, "ASLEEP", math.inf)
    monkeypatch.setattr(workers, "has_streams", has_streams)
    before = traced(devices, case, {})
    advice = before.advice
    after = traced(devices, case, advice.change)
    gain = 1 - after.makespan / before.makespan
    assert advice.gain == pytest.approx(gain, abs=0.05)
    assert dict(advice.change) == CASES[case][-1]
    assert str(before).endswith(str(advice))


def test_nothing_is_said_of_what_is_well_set(devices):
    layers, x = layers_of([0.5] * 8), torch.rand(ROWS, 4, device=devices[0])
    model = GPipe(layers, [2] * 4, devices=devices[:4], chunks=ROWS, checkpoint="never")
    with observe(), trace(model) as timeline:
        model(x).sum().backward()
    assert timeline.advice is None
    assert timeline.step().advice is None
    assert "expected" not in str(timeline)


def test_a_step_with_something_else_in_it(devices):
    """Nothing is said of a step in which something is that the replay does not know of."""
    layers, x = layers_of([0.5] * 4), torch.rand(8, 4, device=devices[0])
    model = GPipe(layers, [3, 1], devices=devices[:2], chunks=2, checkpoint="never")
    slow = Timed(nn.Tanh(), (9.0, 9.0, 9.0)).to(devices[1])
    for loss, said in ((lambda y: y.sum(), True), (lambda y: slow(y).sum(), False)):
        with observe(), trace(model) as timeline:
            loss(model(x)).backward()
        assert (timeline.advice is not None) == said


def test_graphs_stay_graphs(devices):
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    model = GPipe(layers, [4, 2], devices=devices[:2], chunks=4, checkpoint="never")
    training = ScheduledLoss(model, F.mse_loss, stages="graph")
    x, y = torch.rand(8, 4, device=devices[0]), torch.rand(8, 4, device=devices[1])
    training(x, y).backward()
    with observe(costs={"addmm": 1, "mm": 1}), trace(training) as timeline:
        training(x, y).backward()
    assert_graphs(training)
    # Graphs do not run layers, so nobody knows of a better balance.
    assert timeline.advice is None or "balance" not in timeline.advice.change
