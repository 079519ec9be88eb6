"""No schedule is below the bounds, and some schedules reach them."""

import random
from fractions import Fraction
from functools import cache
from itertools import pairwise, permutations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.cases import examples, random_costs, schedules
from tests.support.size import some
from torchgpipe.schedule import (
    Costs,
    Op,
    Schedule,
    bounds,
    one_f_one_b,
    simulate,
    validate,
    zero_bubble_h1,
)


@examples
@given(schedules())
def test_no_schedule_is_below_the_bounds(case):
    schedule, costs = case
    report = simulate(schedule, costs)
    limit = bounds(schedule.placement, schedule.chunks, costs)
    assert limit.makespan <= report.makespan
    assert all(x <= y for x, y in zip(limit.peak, report.peak))
    assert limit.gap(report) >= 0
    for capacity in (report.peak, max(report.peak)):
        tight = bounds(schedule.placement, schedule.chunks, costs, capacity)
        assert limit.makespan <= tight.makespan <= report.makespan
        assert tight.peak == limit.peak


@cache
def all_schedules(placement, chunks):
    """Return all valid orders of F and B, and of F, I and W."""
    found = []
    for kinds in ("FB", "FIW"):
        lines = []
        for w in range(max(placement) + 1):
            stages = [j for j, x in enumerate(placement) if x == w]
            ops = [Op(j, kind, i) for j in stages for i in range(chunks) for kind in kinds]
            cell = [(a, b) for a, b in pairwise(ops) if a[::2] == b[::2]]
            # No other order of a cell can be valid, so validate() need not see it.
            orders = (x for x in permutations(ops) if all(x.index(a) < x.index(b) for a, b in cell))
            lines.append([*orders])
        tried = (Schedule(placement, chunks, program) for program in product(*lines))
        found += [schedule for schedule in tried if not validate(schedule)]
    return found


@pytest.mark.parametrize(
    ("placement", "chunks", "count"),
    [((0,), 2, 26), ((0, 1), 1, 2), ((0, 1, 0), 1, 4), ((0, 0), 1, 4)],
)
@settings(max_examples=some(20, 6))
@given(seed=st.integers(0, 2**32))
def test_of_all_schedules_the_fastest_is_not_below(placement, chunks, count, seed):
    assert len(all_schedules(placement, chunks)) == count
    costs = random_costs(random.Random(seed), len(placement))
    reports = [simulate(schedule, costs) for schedule in all_schedules(placement, chunks)]
    limit = bounds(placement, chunks, costs)
    assert limit.makespan <= min(x.makespan for x in reports)
    assert all(limit.peak[w] <= min(x.peak[w] for x in reports) for w in range(len(limit.peak)))


def test_bounds_that_are_reached():
    for p, m in ((1, 1), (2, 4), (4, 8), (8, 16)):
        h1 = zero_bubble_h1(p, m)
        limit = bounds(h1.placement, m)
        assert (limit.makespan, limit.peak) == (3 * m + p - 1, (1,) * p)
        assert limit.gap(simulate(h1)) == 0
    # One micro-batch has one chain, with W at its end.
    costs = Costs(F=[3, 1], I=[2, 5], W=[1, 4], copy={(0, 1): 0.5, (1, 0): 0.25})
    one = simulate(one_f_one_b(2, 1).split(), costs)
    assert bounds((0, 1), 1, costs).makespan == one.makespan == 3 + 0.5 + 1 + 5 + 4
    # The last micro-batch leaves stage 0 at 40, and stage 1 has a W of 6 after its F and I.
    assert bounds((0, 1), 4, Costs(F=[10, 1], I=1, W=[0, 6])).makespan == 48
    # All workers wait for the slowest stage.
    slow = Costs(F=[1, 10, 1], I=[1, 10, 1], W=0)
    assert bounds((0, 1, 2), 5, slow).makespan == 1 + 100 + 1
    assert bounds((0, 1, 2), 5, slow).gap(simulate(one_f_one_b(3, 5), slow)) == 0


def test_overlaps_are_counted_as_far_as_they_can_help():
    both = Costs(F=1, I=1, W=1, overlap=lambda a, b: 0.75 * (a + b) if a == b else a + b)
    assert bounds((0,), 4, both).makespan == 0.75 * 12
    assert bounds((0,), 4).makespan == 12


def test_memory():
    costs = Costs(activation=[4, 2, 3], checkpoint=[1, 5, 0])
    # While the micro-batch comes back to stage 2, the worker keeps stage 0's checkpoint.
    assert bounds((0, 1, 0), 3, costs).peak == (4, 2)
    assert bounds((0, 0, 0), 3, costs).peak == (1 + 2 + 3,)
    assert bounds((0, 1, 0), 3, costs, capacity=[4, 1]).makespan == inf
    assert bounds((0, 1, 0), 3, costs, capacity=[4, 2]).makespan < inf
    assert bounds((0,), 1, Costs(activation=0), capacity=0).makespan == 3


def test_rounding_is_no_gap():
    costs = Costs(F=1 / 7, I=1.1 / 7, W=0.9 / 7)
    for p, m in ((2, 2), (3, 4), (5, 7)):
        gap = bounds(range(p), m, costs).gap(simulate(zero_bubble_h1(p, m), costs))
        assert f"{gap:.1%}"[0] != "-"


def test_nothing_costs_nothing():
    free = Costs(F=0, I=0, W=0)
    assert bounds((0, 1), 2, free).gap(simulate(one_f_one_b(2, 2), free)) == 0


def test_arguments_must_fit():
    for arguments in (((0, 2), 1), ((), 1), ((0, 1), 0)):
        with pytest.raises(ValueError, match="number the workers without gaps"):
            bounds(*arguments)
    with pytest.raises(ValueError, match="capacity must be"):
        bounds((0, 1), 1, capacity=[1, -1])
    with pytest.raises(ValueError, match="F must be"):
        bounds((0, 1), 1, Costs(F=[Fraction(1)]))
