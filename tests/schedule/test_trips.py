"""Cells that leave for the memory of the host: which ones, when, and how long steps take."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import examples, schedules
from torchgpipe.schedule import Costs, fill_drain, named, one_f_one_b, parse, simulate, validate
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.program import Op
from torchgpipe.schedule.rewrite import with_modes
from torchgpipe.schedule.trips import Trip, leaving, trips


def test_a_cell_leaves_where_three_instructions_lie_between():
    (line,) = parse("0F0 0F1 0F2 0B2 0B1 0B0", [0], 3).program
    assert trips(line, [1]) == [Trip(0, 0, 0, 1, 4, 5)]
    assert trips(line, [2]) == [Trip(0, 0, 0, 1, 3, 5)]
    # It comes back after the instruction that it leaves in, and no earlier.
    assert trips(line, [9]) == [Trip(0, 0, 0, 1, 2, 5)]
    assert trips(line, [0]) == []
    (again,) = parse("0F0 0F1 0F2 0B2 0B1 0R0 0B0", [0], 3).program
    assert trips(again, [1]) == []


def test_an_overlap_is_one_instruction():
    (line,) = parse("0F0 (0F1;1F0) (0F2;1B0) 0B0 0B1 0B2", [0, 0], 3).program
    assert trips(line, [1, 1]) == []
    (line,) = parse("0F0 (0F1;1F0) (1F1;1B0) 0F2 0B0 0B1 0B2", [0, 0], 3).program
    assert [(x.stage, x.microbatch) for x in trips(line, [1, 1])] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("m", range(1, 9))
def test_the_last_two_stay_where_autograd_orders_backward(m):
    assert [*leaving(m)] == [*range(m - 2)]
    (line,) = fill_drain(1, m).program
    assert sorted(x.microbatch for x in trips(line, [1])) == [*leaving(m)]


def test_times_by_hand():
    schedule = parse("0F0 0F1 0F2 0B2 0B1 0B0", [0], 3)
    costs = Costs(F=2, I=2, W=2, activation=10, away=8, out=3, back=5)
    report = simulate(schedule, costs)
    # F2 begins when cell 0 is gone, and B0 when it has come.
    assert (report.out, report.back) == ({(0, 0): (2, 5)}, {(0, 0): (11, 16)})
    assert (report.makespan, report.bubble) == (20, (2,))
    # While F2 runs: cells 1 and 2, and 2 of cell 0. While B1 does: cells 0 and 1.
    assert (report.peak, report.host) == ((22,), (8,))
    assert str(report).splitlines()[0].split() == ["worker", "busy", "bubble", "peak", "host"]
    spans = {x.name: x.stream.number for x in report.timeline.spans if not x.computes}
    assert spans == {"0 out 0": 2, "0 back 0": 3}
    assert validate(schedule, 22, costs) == []
    assert validate(schedule, 21, costs)


def test_copies_of_a_worker_are_made_one_after_the_other():
    schedule = fill_drain(1, 5)
    report = simulate(schedule, Costs(F=1, I=1, W=1, away=1, out=3, back=4))
    outs, backs = (
        [copies[0, i] for i in order]
        for copies, order in (
            (report.out, (0, 1, 2)),
            (report.back, (2, 1, 0)),
        )
    )
    for found in (outs, backs):
        assert all(end <= start for (_, end), (start, _) in pairwise(found))
    # Each copy holds up one computation for as long as it takes longer.
    assert report.makespan == 5 + 10 + 3 * (3 - 1) + 3 * (4 - 2)


@examples
@given(schedules())
def test_copies_that_take_no_time_change_none(case):
    schedule, costs = case
    plain = simulate(schedule, costs)
    given = {name: getattr(costs, name) for name in costs.__dataclass_fields__}
    away = Costs(**given | {"away": [x / 2 for x in costs.activation], "prefetch": 2})
    report = simulate(schedule, away)
    assert (report.start, report.end) == (plain.start, plain.end)
    assert all(x <= y for x, y in zip(report.peak, plain.peak))
    slow = simulate(schedule, Costs(**given | {"away": away.away, "out": Fraction(7, 3)}))
    assert slow.makespan >= plain.makespan
    limit = bounds(schedule.placement, schedule.chunks, away)
    if costs.overlap is not max:
        assert limit.makespan <= report.makespan
    assert all(x <= y for x, y in zip(limit.peak, report.peak))


@examples
@given(schedules(), st.integers(0, 2**32))
def test_to_keep_all_is_fastest_and_to_come_back_late_is_smallest(case, seed):
    """A search leaves out what cannot be better for these two reasons."""
    (schedule, costs), rng = case, random.Random(seed)
    plain = [x for line in schedule.program for x in line if isinstance(x, Op) and x.kind != "R"]
    if len(plain) < sum(map(len, schedule.program)):
        return
    each = range(len(schedule.placement))
    out, back = ([Fraction(rng.randint(0, 40), 10) for _ in each] for _ in range(2))

    def report(modes):
        """Simulate stages that are computed again, or whose cells come back so early."""
        away = [isinstance(x, int) for x in modes]
        words = ["never" if x else mode for x, mode in zip(away, modes)]
        prefetch = [mode if x else 1 for x, mode in zip(away, modes)]
        program = with_modes(schedule.program, words, schedule.chunks)
        leaving = replace(
            costs, activation=7, checkpoint=1, away=[5 * x for x in away], prefetch=prefetch
        )
        return simulate(replace(schedule, program=program), replace(leaving, out=out, back=back))

    modes = [rng.choice(["never", "except_last", "always", 1, 2]) for _ in each]
    some = ["never" if rng.random() < 0.5 else mode for mode in modes]
    assert report(some).makespan <= report(modes).makespan
    late = [1 if mode == 2 else mode for mode in modes]
    assert all(x <= y for x, y in zip(report(late).peak, report(modes).peak))


def test_costs_that_do_not_fit_are_errors():
    schedule = one_f_one_b(2, 4)
    for costs, rule in (
        (Costs(away=2), "away must be a part of activation"),
        (Costs(away=1, prefetch=0), "prefetch must be positive integers"),
        (Costs(away=1, out=-1), "out must be a number"),
        (Costs(away=1, prefetch=1.5), "prefetch must be positive integers"),
    ):
        with pytest.raises(ValueError, match=rf"{rule}.* \("):
            simulate(schedule, costs)


def test_schedules_with_memory_of_the_host_are_ranked_by_it():
    plain = named("1f1b", 4, 8)
    assert simulate(plain, Costs(away=1)).peak == (3, 3, 2, 1)
