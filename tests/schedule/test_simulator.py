"""The simulator agrees with the textbook, and with the definition of a schedule."""

from fractions import Fraction

import pytest
from hypothesis import given

from tests.schedule.cases import examples, mixed_overlap, schedules, share
from tests.support.size import some
from torchgpipe.schedule import (
    Costs,
    Op,
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    parse,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.program import needs, operations, operations_of

#: F, I, W of all stages of a worker.
COSTS = [(1, 1, 1), (2, 3, 1), (3, 1, 2), (1, 4, 3), (Fraction(5, 3), Fraction(1, 2), 2)]
SIZES = some(
    [(p, m) for p in (1, 2, 3, 4, 6) for m in (p, 2 * p, 3 * p, 5 * p)],
    [(1, 1), (2, 2), (2, 4), (3, 9), (4, 4)],
)


def test_longest():
    """The workers of ZB-H2 begin and end one after the other, and wait for nothing else."""
    report = simulate(zero_bubble_h2(4, 8), Costs(F=1, I=1, W=1))
    assert (report.longest, report.makespan) == (24, 27)
    assert simulate(one_f_one_b(4, 8)).longest == simulate(one_f_one_b(4, 8)).makespan == 33


def bubble(report):
    """Return the time that the busiest worker waits."""
    return min(report.bubble)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_textbook(p, m, costs):
    f, i, w = costs
    b = i + w

    def of(schedule):
        return simulate(schedule, share(schedule, costs))

    gpipe = of(fill_drain(p, m))
    assert (bubble(gpipe), gpipe.peak) == ((p - 1) * (f + b), (m,) * p)
    late = of(fill_drain(p, m).split().defer_weights(m))
    assert bubble(late) == (p - 1) * (f + i)
    one = of(one_f_one_b(p, m))
    assert (bubble(one), one.peak) == ((p - 1) * (f + b), tuple(min(m, p - k) for k in range(p)))
    h1 = of(zero_bubble_h1(p, m))
    assert (bubble(h1), max(h1.peak)) == ((p - 1) * max(f, i, f + i - w), min(m, p))
    if w <= min(f, i):
        assert bubble(h1) == (p - 1) * (f + i - w)
    for v in (2, 3):
        looped = of(looped_bfs(p, m, v))
        assert (bubble(looped), max(looped.peak)) == (Fraction((p - 1) * (f + b)) / v, m)
        inter = of(interleaved(p, m, v))
        assert bubble(inter) == Fraction((p - 1) * (f + b)) / v
        assert max(inter.peak) == (p + Fraction(p - 1, v) if m > p else p)


def test_a_synchronous_flush_takes_what_h2_gains():
    for p in (2, 4, 8):
        h1, h2 = (simulate(f(p, 3 * p)) for f in (zero_bubble_h1, zero_bubble_h2))
        assert h1.makespan == h2.makespan == 9 * p + p - 1
        assert (max(h1.peak), max(h2.peak)) == (p, 2 * p - 1)


def test_stage_0_has_no_useful_input_gradient():
    """No computation but its W needs the I of stage 0, so its time may as well be spent at W."""
    for function in (zero_bubble_h1, zero_bubble_h2, zero_bubble_v):
        schedule = function(4, 8)
        rest = len(schedule.placement) - 1
        plain = simulate(schedule, Costs(F=1, I=2, W=1))
        real = simulate(schedule, Costs(F=1, I=[0, *[2] * rest], W=[3, *[1] * rest]))
        assert (real.makespan, real.busy) == (plain.makespan, plain.busy)
        source = Op(0, "I", 3)
        assert [op for op in plain.start if source in needs(op, plain.start)] == [Op(0, "W", 3)]


def test_by_hand():
    schedule = parse("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 2F0 (1F1;2B0) 1B0 2F1 2B1 1B1", [0, 1, 1], 2)
    report = simulate(
        schedule,
        Costs(F=[1, 2, 3], I=2, W=[1, 0.5, 1.5], copy={(0, 1): 0.5, (1, 0): 4}, overlap=max),
    )
    times = {str(op): (report.start[op], report.end[op]) for op in report.start}
    assert times == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1.5, 3.5),
        "2F0": (3.5, 6.5),
        "1F1": (6.5, 10),
        "2B0": (6.5, 10),
        "1B0": (10, 12.5),
        "2F1": (12.5, 15.5),
        "2B1": (15.5, 19),
        "1B1": (19, 21.5),
        "0I0": (16.5, 18.5),
        "0I1": (25.5, 27.5),
        "0W0": (27.5, 28.5),
        "0W1": (28.5, 29.5),
    }
    assert (report.makespan, report.busy) == (29.5, (8, 20))
    assert report.bubble == (21.5, 9.5)
    assert (
        str(report)
        == """\
worker      busy    bubble      peak
     0         8      21.5         2
     1        20       9.5         3
makespan 29.5"""
    )


def test_memory_by_hand():
    schedule = parse("0F0 0F1 0R0 0I0 0I1 0W0 0W1", [0], 2)
    costs = Costs(activation=10, pending=16, checkpoint=1)
    # F0 keeps its checkpoint, F1 its activation; R0 adds 10 - 1; each I changes 10 into 16.
    assert [*table(costs, schedule).held(schedule.program[0])] == [1, 11, 20, 26, 32, 32, 16]
    assert simulate(schedule, costs).peak == (32,)
    assert simulate(schedule, Costs(activation=10, pending=2)).peak == (20,)


def table(costs, schedule):
    return Table(costs, schedule.placement)


def test_memory_between_instructions():
    """Worker 0 waits with the checkpoint of 0F1, which is larger than the activation after 0R1."""
    schedule = parse("0F0 0F1 0B0 (0R1;2F0) 2B0 0B1\n1F0 1B0", [0, 1, 0], 2)
    costs = Costs(activation=1, checkpoint=9)
    assert [*table(costs, schedule).held(schedule.program[0])] == [1, 10, 10, 2, 2, 1]
    # After I, a cell keeps its pending memory until W, which is missing here.
    before = parse("0F0 0I0 0F1", [0], 2)
    assert [*table(Costs(pending=5), before).held(before.program[0])] == [1, 5, 6]


@examples
@given(schedules())
def test_each_instruction_begins_as_soon_as_it_may(case):
    schedule, costs = case
    report = simulate(schedule, costs)
    ops = {*operations_of(schedule.program)}
    assert {*report.start} == {*report.end} == ops
    costs_of = table(costs, schedule)
    for w, line in enumerate(schedule.program):
        free = 0
        for instruction in line:
            parts = operations(instruction)
            (begin,) = {report.start[op] for op in parts}
            (end,) = {report.end[op] for op in parts}
            arrivals = [
                report.end[x] + costs_of.delay((x, op)) for op in parts for x in needs(op, ops)
            ]
            assert begin == max([free, *arrivals])
            times = [costs_of.time[op.kind][op.stage] for op in parts]
            assert end - begin == (costs.overlap(*times) if len(times) == 2 else times[0])
            free = end
        assert report.busy[w] + report.bubble[w] == report.makespan
    assert report.makespan == max(report.end.values())


@examples
@given(schedules())
def test_memory_is_that_of_its_events(case):
    schedule, costs = case
    report = simulate(schedule, costs)
    ops = {*operations_of(schedule.program)}
    for w, line in enumerate(schedule.program):
        peak = 0
        # While each instruction runs, and after it.
        for begun, over in [(k + 1, k + late) for k in range(len(line)) for late in (0, 1)]:
            before = {op for x in line[:begun] for op in operations(x)}
            ended = {op for x in line[:over] for op in operations(x)}
            held = 0
            for stage, kind, i in before:
                cell = {x: Op(stage, x, i) for x in "FBIWR"}
                if kind == "F" and not {cell["B"], cell["I"]} & ended:
                    kept = cell["R"] in ops and cell["R"] not in before
                    held += (costs.checkpoint if kept else costs.activation)[stage]
                if kind == "I" and cell["I"] in ended and cell["W"] not in ended:
                    held += costs.pending[stage]
            peak = max(peak, held)
        assert report.peak[w] == peak


def test_faults_and_costs_that_do_not_fit_are_errors():
    with pytest.raises(
        ValueError, match=r"must be valid \(faults: 2\); fix .*\nmissing: 0B0 on worker 0\n"
    ):
        simulate(parse("0F0 0B1 0F1", [0], 2))
    schedule = one_f_one_b(2, 3)
    for costs in (
        Costs(F=[1]),
        Costs(F={0: 5, 1: 7}),
        Costs(F=None),
        Costs(F=[1, "2"]),
        Costs(I=-1),
        Costs(W=float("nan")),
        Costs(R=[1, float("inf")]),
        Costs(copy=-0.5),
        Costs(copy={(0, 1): 1}),
        Costs(activation=[1, 2, 3]),
        Costs(pending=-1),
        Costs(checkpoint=[0]),
    ):
        with pytest.raises(ValueError, match=r"must be a number, .*; give one"):
            simulate(schedule, costs)
    overlapping = parse("0F0 (0F1;0B0) 0B1", [0], 2)
    assert simulate(overlapping, Costs(overlap=mixed_overlap)).makespan == 1 + 2.5 + 2
    for overlap in (min, lambda a, b: float("nan"), lambda a, b: float("inf")):
        with pytest.raises(
            ValueError, match=r"overlap must return .*\(overlap\(1, 2\): .*\); use max"
        ):
            simulate(overlapping, Costs(overlap=overlap))
