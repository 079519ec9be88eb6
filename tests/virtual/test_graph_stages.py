"""Stages that are graphs on virtual accelerators: no race, and the time that the simulator says."""

import pytest
import torch

from tests.support.helpers import MODES, assert_graphs, assert_no_races
from tests.support.schedules import CASES, NAMES, compare, schedule_for, workers_of
from tests.support.size import SOAK
from tests.virtual.test_schedule_races import train
from tests.virtual.test_schedule_races import training_of as racing
from tests.virtual.test_schedule_times import costs_of, expected, makespans
from tests.virtual.test_schedule_times import training_of as timed
from torchgpipe.testing import observe

TRACED = [x for x in CASES if x != "deferred norms"]
TRACED = TRACED if SOAK else TRACED[::6]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", TRACED)
def test_gradients_and_buffers(devices, case, name, mode):
    torch.manual_seed(0)
    with observe(jitter=0) as seen:
        training = compare(CASES[case](), schedule_for(case, name), devices, mode, stages="graph")
    assert_no_races(seen)
    assert_graphs(training)


@pytest.mark.parametrize("copy", [0, 0.25])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_makespan(devices, name, mode, copy):
    workers = workers_of(name)
    training = timed(name, [devices[w] for w in workers], mode)
    training.stages = "graph"
    found = makespans(training, copy=copy)
    assert found == pytest.approx([expected(training, costs_of(copy=copy))] * len(found))
    assert_graphs(training)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["1f1b", "zbh1", "zbv", "dualpipe_v"] if SOAK else ["zbh1", "dualpipe_v"]
)
def test_memory_is_not_reused_too_early(devices, name, mode):
    training = racing(name, [devices[w] for w in workers_of(name)], mode, outputs=True)
    training.stages = "graph"
    train(training)
