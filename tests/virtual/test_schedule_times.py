"""Schedules take the time that the simulator says, whatever the host does."""

from itertools import product

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races
from tests.support.schedules import FEW, ONE, TWO, workers_of
from tests.support.size import SOAK, some
from tests.support.skips import Pop, Stash
from tests.virtual.stages import own_streams, squares
from torchgpipe import GPipe, NoChunk, ScheduledLoss
from torchgpipe.schedule import Costs, Overlap, Schedule, parse, simulate
from torchgpipe.testing import Busy, observe

SEEDS = range(some(20, 1))
NAMES = (*ONE, *TWO) if SOAK else FEW

#: Numbers in a row, and the bytes of a micro-batch of two rows.
WIDTH, BYTES = 4, 32


def stage(forward=1, input=1, weight=1):
    return nn.Sequential(Busy(forward, input, weight, features=WIDTH), nn.Tanh())


def training_of(schedule, devices, mode="never", m=8, costs=(1, 1, 1), layers=None):
    """A scheduled loss over busy stages, on the device of each stage."""
    layers = layers or [stage(*costs) for _ in devices]
    model = GPipe(
        nn.Sequential(*layers), [1] * len(layers), devices=devices, chunks=m, checkpoint=mode
    )
    return ScheduledLoss(model, squares, schedule)


def costs_of(times=(1, 1, 1), copy=0):
    forward, input, weight = times
    # Two streams of a virtual device do not slow each other down.
    return Costs(F=forward, I=input, W=weight, R=forward, copy=copy, overlap=max)


def makespans(training, *, copy=0, seeds=(None, *SEEDS), target_on=-1, own=False):
    """Makespans of the schedule in some steps, which must not race."""
    model = training.model
    m, devices = model.chunks, model.devices
    x = torch.rand(2 * m, WIDTH, device=devices[0], requires_grad=True)
    y = torch.rand(2 * m, WIDTH, device=devices[target_on])
    indices = {device.index for device in devices}
    links = {(a, b): BYTES / copy for a in indices for b in indices if a != b} if copy else {}
    found = []
    with own_streams(dict.fromkeys(devices), own):
        for seed in seeds:
            with observe(jitter=seed, bandwidth=links) as seen:
                loss = training(x, y)
                found.append(seen.makespan)
                loss.backward()
            assert_no_races(seen)
    return found


def expected(training, costs):
    plan = training._plan(training.model.chunks, forward=False)
    return float(simulate(plan.schedule, costs).makespan)


@pytest.mark.parametrize(
    ("name", "mode", "copy"),
    some(
        [*product(NAMES, MODES, [0, 0.25])],
        # Each name, with modes and copies by turns.
        [(name, MODES[k % 3], (0.25, 0)[k % 2]) for k, name in enumerate(NAMES)],
    ),
)
def test_makespan(devices, name, mode, copy):
    workers = workers_of(name)
    training = training_of(name, [devices[w] for w in workers], mode)
    found = makespans(training, copy=copy)
    assert found == pytest.approx([expected(training, costs_of(copy=copy))] * len(found))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe_v"])
def test_other_streams_of_the_caller(devices, name):
    training = training_of(name, [devices[w] for w in workers_of(name)])
    found = makespans(training, own=True)
    assert found == [expected(training, costs_of())] * len(found)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_workers_that_share_a_device(devices, name):
    training = training_of(name, [devices[0]] * 4)
    found = makespans(training)
    assert found == [expected(training, costs_of())] * len(found)


def test_unequal_times(devices):
    times = (1.5, 2.5, 0.5)
    training = training_of("zbh1", devices[:4], costs=times)
    found = makespans(training, copy=0.125)
    assert found == pytest.approx([expected(training, costs_of(times, 0.125))] * len(found))


@pytest.mark.parametrize("target_on", [0, 1])
def test_targets_from_another_device_hold_nobody_up(devices, target_on):
    training = training_of("1f1b", devices[:4])
    found = makespans(training, target_on=target_on)
    assert found == [expected(training, costs_of())] * len(found)


def test_targets_that_go_whole_are_moved_too(devices):
    training = training_of("1f1b", devices[:2], m=2)
    training.loss = lambda output, target, other: squares(output, target * other)
    x, y = (torch.rand(4, WIDTH, device=devices[k]) for k in (0, 1))
    with observe() as seen:
        training(x, y, NoChunk(torch.rand(WIDTH, device=devices[0]))).backward()
    assert_no_races(seen)


def test_overlap_of_two_cells_of_one_stage(devices):
    """A weight stays on its stream, so these are computed one after the other."""
    schedule = parse("0F0 (0F1;0B0) (0F2;0B1) 0B2", [0], 3)
    training = training_of(schedule, devices[:1], m=3)
    found = makespans(training)
    assert found == [simulate(schedule).makespan] * len(found)


def test_overlap_of_two_backwards(devices):
    line = "0F0 1F0 2F0 0F1 1F1 2F1 2B0 (2B1;1B0) (1B1;0B0) 0B1"
    schedule = parse(line, [0, 0, 0], 2)
    assert any(isinstance(x, Overlap) for x in schedule.program[0])
    training = training_of(schedule, [devices[0]] * 3, m=2)
    found = makespans(training)
    assert found == [expected(training, costs_of())] * len(found)


@pytest.mark.parametrize("copy", [0, 3])
def test_skip(devices, copy):
    """A skip takes a way of its own, and its copy may take longer than the stages between."""
    layers = [stage() for _ in range(4)]
    layers[0], layers[3] = layers[0].append(Stash()), layers[3].insert(0, Pop())
    training = training_of("1f1b", devices[:4], m=8, layers=layers)
    found = makespans(training, copy=copy)
    assert found == [expected(training, costs_of(copy=copy))] * len(found)


def test_program_decides_and_not_the_placement_of_the_caller(devices):
    """A worker's instructions are in order, also where another order would be faster."""
    lazy = Schedule((0, 1), 2, parse("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", [0, 1], 2).program)
    training = training_of(lazy, devices[:2], m=2)
    assert makespans(training) == [expected(training, costs_of())] * (1 + len(SEEDS))
