"""Stages that are graphs on virtual accelerators: no race, and the time that the simulator says."""

from itertools import product

import pytest
import torch

from tests.support.helpers import MODES, assert_graphs, assert_no_races
from tests.support.schedules import CASES, NAMES, compare, schedule_for, workers_of
from tests.support.size import some
from tests.virtual.stages import ONE_MODE
from tests.virtual.test_schedule_races import train
from tests.virtual.test_schedule_races import training_of as racing
from tests.virtual.test_schedule_times import costs_of, expected, makespans
from tests.virtual.test_schedule_times import training_of as timed
from torchgpipe.testing import observe

TRACED = [x for x in CASES if x != "deferred norms"]
TRACED = some(TRACED, TRACED[::6])


#: Each schedule, with modes by turns.
BY_TURNS = [(name, MODES[k % 3]) for k, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "mode"), some([*product(NAMES, MODES)], BY_TURNS))
@pytest.mark.parametrize("case", TRACED)
def test_gradients_and_buffers(devices, case, name, mode):
    torch.manual_seed(0)
    with observe(jitter=0) as seen:
        training = compare(CASES[case](), schedule_for(case, name), devices, mode, stages="graph")
    assert_no_races(seen)
    assert_graphs(training)


@pytest.mark.parametrize("copy", some([0, 0.25], [0.25]))
@pytest.mark.parametrize(("name", "mode"), some([*product(NAMES, MODES)], BY_TURNS[::-2]))
def test_makespan(devices, name, mode, copy):
    workers = workers_of(name)
    training = timed(name, [devices[w] for w in workers], mode)
    training.stages = "graph"
    found = makespans(training, copy=copy)
    assert found == pytest.approx([expected(training, costs_of(copy=copy))] * len(found))
    assert_graphs(training)


@pytest.mark.parametrize("mode", ONE_MODE)
@pytest.mark.parametrize("name", some(["1f1b", "zbh1", "zbv", "dualpipe_v"], ["dualpipe_v"]))
def test_memory_is_not_reused_too_early(devices, name, mode):
    training = racing(name, [devices[w] for w in workers_of(name)], mode, outputs=True)
    training.stages = "graph"
    train(training)
