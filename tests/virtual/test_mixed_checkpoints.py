"""A checkpoint mode for each partition: no race, memory where it was asked for, and the time."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.schedules import workers_of
from tests.support.size import some
from tests.virtual.stages import SEEDS, Stage, limit, makespans, squares
from tests.virtual.test_memory import (
    verify_peak,
)
from tests.virtual.test_schedule_times import costs_of, expected
from tests.virtual.test_schedule_times import makespans as scheduled_makespans
from tests.virtual.test_schedule_times import stage as busy
from torchgpipe import ScheduledLoss
from torchgpipe.schedule import Costs, Op, named, simulate
from torchgpipe.schedule.rewrite import with_modes
from torchgpipe.testing import observe

MIXED = [
    ["never", "always", "except_last", "never"],
    ["always", "never", "never", "always"],
    ["never", "except_last", "always", "except_last"],
    ["always", "always", "never", "except_last"],
]
MIXED = some(MIXED, MIXED[:2])
NAMES = some(["fill_drain", "1f1b", "zbh1", "zbv"], ["1f1b", "zbv"])


@pytest.mark.parametrize("modes", MIXED, ids=" ".join)
def test_peak(devices, modes):
    verify_peak(devices, modes, 8, 16)


@pytest.mark.parametrize("modes", MIXED, ids=" ".join)
def test_makespan(devices, modes):
    """A partition recomputes before the gradient comes, so a stage delays nobody by all its R."""
    model = wrap([Stage() for _ in modes], devices[:4], modes, 8)
    for seed in SEEDS:
        found = makespans(model, seed=seed, requires_grad=bool(seed % 2))
        assert found == [limit(modes, 4, 8)] * 2, f"jitter {seed}"


def test_figures_of_the_guide():
    schedule = named("1f1b", 4, 8)
    found = {}
    for modes in ("never", "always", ("always", "always", "never", "never")):
        program = with_modes(schedule.program, modes, 8)
        result = simulate(replace(schedule, program=program), Costs(activation=1, checkpoint=0))
        found[modes] = result.makespan, result.peak
    assert [*found.values()] == [
        (33, (4, 3, 2, 1)),
        (41, (1, 1, 1, 1)),
        (38, (1, 1, 2, 1)),
    ]


@settings(max_examples=some(50, 3))
@given(st.lists(st.sampled_from(MODES), min_size=3, max_size=3), st.sampled_from([1, 2, 5]))
def test_makespan_of_any_modes(devices, modes, m):
    model = wrap([Stage() for _ in modes], devices[:3], modes, m)
    assert makespans(model, seed=1) == [limit(modes, 3, m)] * 2


@pytest.mark.parametrize(
    ("name", "modes", "stages"),
    some(
        [*product(NAMES, MIXED, ["eager", "graph"])],
        [("1f1b", MIXED[1], "eager"), ("zbv", MIXED[0], "graph")],
    ),
    ids=str,
)
def test_makespan_of_a_schedule(devices, name, modes, stages):
    model = wrap([busy() for _ in modes], [devices[w] for w in workers_of(name)], modes, 8)
    training = ScheduledLoss(model, squares, name, stages=stages)
    schedule = training._plan(8, forward=False).schedule
    never = {j for j, mode in enumerate(modes) if mode == "never"}
    again = {x for line in schedule.program for x in line if isinstance(x, Op) and x.kind == "R"}
    assert {op.stage for op in again}.isdisjoint(never)
    found = scheduled_makespans(training)
    if stages == "graph":
        # Layers are traced after their first step.
        found = found[1:]
    assert found == pytest.approx([expected(training, costs_of())] * len(found))


def test_changed_between_steps(devices):
    model = wrap([Stage() for _ in range(4)], devices[:4], "never", 8)
    for modes in ("never", MIXED[0], "always", MIXED[1]):
        model.checkpoint = modes
        assert makespans(model, seed=0) == [limit(modes, 4, 8)] * 2


@pytest.mark.parametrize("place", [[0, 0, 1, 1], [0, "cpu", 1, 1]], ids=str)
def test_shared_devices(devices, place):
    places = [k if k == "cpu" else devices[k] for k in place]
    grads = []
    for modes in ("never", *MIXED):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
        model = wrap(layers, places, modes, 4)
        torch.manual_seed(1)
        x = torch.rand(8, 4).to(devices[0]).requires_grad_()
        with observe(jitter=2) as seen:
            model(x).square().mean().backward()
        assert_no_races(seen)
        grads.append([x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())])
    assert all(torch.equal(a, b) for own in grads for a, b in zip(own, grads[0]))
