"""A replay takes what the simulator says, unless the host is late."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import examples, schedules
from torchgpipe.planner.replays import replayed
from torchgpipe.schedule import Costs, fill_drain, simulate
from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.simulator import in_order


def replay(schedule, costs, host, by_autograd=False):
    table = Table(costs, schedule.placement, schedule.skips)
    return replayed(in_order(schedule), table, host, by_autograd=by_autograd)


@examples
@given(schedules(), st.booleans())
def test_host_that_takes_no_time(case, by_autograd):
    schedule, costs = case
    found = replay(schedule, costs, {}, by_autograd)
    assert found == pytest.approx(float(simulate(schedule, costs).makespan))


@examples
@given(schedules(), st.integers(0, 2**32))
def test_host_that_is_late(case, seed):
    """The step takes as long as the devices do, at least, and as the host does."""
    schedule, costs = case
    draw = random.Random(seed)
    host = {(kind, j): draw.random() for kind in "FRBIW" for j in range(len(schedule.placement))}
    found = replay(schedule, costs, host)
    assert found >= float(simulate(schedule, costs).makespan) - 1e-9
    issued = sum(host[op.kind, op.stage] for op in simulate(schedule, costs).start)
    assert found >= issued - 1e-9


def test_threads_of_autograd():
    """Each issues its own backward, after what it needs, and all after the forward."""
    schedule, kinds = fill_drain(2, 4), {("F", 0): 1, ("F", 1): 1, ("B", 0): 1, ("B", 1): 1}
    costs = Costs(F=0, I=0, W=0)
    assert replay(schedule, costs, kinds) == 16
    # 8 forwards by one thread; then 4 backwards of each worker, one after the other.
    assert replay(schedule, costs, kinds, by_autograd=True) == 8 + 4 + 1
