"""Built-in schedules by name, and the ranking of all."""

import pytest

from torchgpipe import schedule
from torchgpipe.schedule import Costs, best, bounds, named, simulate, validate


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("fill_drain", "fill_drain"),
        ("GPipe", "fill_drain"),
        ("1F1B", "one_f_one_b"),
        ("one-f-one-b", "one_f_one_b"),
        ("Interleaved1F1B", "interleaved"),
        ("LoopedBFS", "looped_bfs"),
        ("ZB-H1", "zero_bubble_h1"),
        ("zero bubble h2", "zero_bubble_h2"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zero_bubble_v"),
        ("V-Half", "v_half"),
        ("v_min", "v_min"),
        ("DualPipeV", "dualpipe_v"),
        ("Hanayo", "wave"),
    ],
)
def test_names(name, function):
    assert named(name, 2, 4) == getattr(schedule, function)(2, 4)


def test_names_take_parameters():
    assert named("interleaved", 2, 4, stages_per_worker=3) == schedule.interleaved(2, 4, 3)
    assert named("wave", workers=2, chunks=4, waves=2) == schedule.wave(2, 4, 2)


def test_unknown_names():
    with pytest.raises(
        ValueError, match=r"of a built-in schedule \(name: '2f2b'\); use one of gpipe, .* wave$"
    ):
        named("2f2b", 2, 4)


def test_all_are_ranked():
    found = best(4, 8)
    names = [x.name.partition("(")[0] for x in found]
    assert {*names} >= {
        *("fill_drain", "one_f_one_b", "interleaved", "looped_bfs", "zero_bubble_h1"),
        *("zero_bubble_h2", "interleaved_zero_bubble", "zero_bubble_v", "v_half", "v_min"),
        *("dualpipe_v", "wave"),
    }
    keys = [(x.report.makespan, max(x.report.peak)) for x in found]
    assert keys == sorted(keys)
    assert found[0].name == "interleaved_zero_bubble(4, 8, stages_per_worker=4)"
    for candidate in found:
        assert eval(candidate.name, vars(schedule)) == candidate.schedule
        assert candidate.gap >= 0
        v = len(candidate.schedule.placement) // 4
        costs = Costs(F=1 / v, I=1 / v, W=1 / v, R=1 / v, activation=1 / v)
        assert candidate.report == simulate(candidate.schedule, costs)
        assert candidate.report == simulate(candidate.schedule, candidate.costs)
    assert str(found[0]).split()[-6:] == ["makespan", "24.75", "peak", "4", "gap", "0.0%"]


def test_only_what_fits():
    found = best(4, 8, capacity=2.5)
    assert found[0].name == "v_min(4, 8)"
    assert all(max(x.report.peak) <= 2.5 for x in found)
    again = {x.name for x in found if x.name.endswith(".recompute()")}
    assert "fill_drain(4, 8).recompute()" in again
    assert all(eval(x.name, vars(schedule)) == x.schedule for x in found)
    assert not {x.name for x in found} & {x.removesuffix(".recompute()") for x in again}
    costs = Costs(checkpoint=1)
    message = r"must be enough .*\(capacity: 0.5, smallest peak: [\d.]+\); use more workers"
    with pytest.raises(ValueError, match=message):
        best(2, 4, costs, capacity=0.5)


def test_stages_per_worker():
    names = {x.name for x in best(2, 4, stages_per_worker=[1])}
    functions = ("fill_drain", "one_f_one_b", "zero_bubble_h1", "zero_bubble_h2")
    assert names == {f"{x}(2, 4)" for x in functions}
    names = {x.name.partition("(")[0] for x in best(2, 4, stages_per_worker=[3])}
    assert names == {"interleaved", "looped_bfs", "interleaved_zero_bubble"}
    for counts in ([0], [], [1.5]):
        with pytest.raises(ValueError, match="stages_per_worker"):
            best(2, 4, stages_per_worker=counts)


def test_costs_of_a_share_are_divided():
    """The costs stay those of one model, however many stages it is cut into."""
    costs = Costs(
        F=[4, 8], I=2, W=[2, 4], R=[6, 2], copy=3, activation=[8, 4], pending=1, checkpoint=[2, 4]
    )
    halves = Costs(
        F=[2, 2, 4, 4],
        I=1,
        W=[1, 1, 2, 2],
        R=[3, 3, 1, 1],
        copy=3,
        activation=[4, 4, 2, 2],
        pending=0.5,
        checkpoint=[1, 1, 2, 2],
    )
    found = best(2, 6, costs, stages_per_worker=[1, 2])
    for candidate in found:
        assert candidate.costs == (costs if len(candidate.schedule.placement) == 2 else halves)
    assert {len(x.schedule.placement) for x in found} == {2, 4}
    with pytest.raises(ValueError, match=r"makes new edges .*stages per worker: 2"):
        best(2, 4, Costs(copy={(0, 1): 1, (1, 0): 1}))
    found = best(2, 4, Costs(copy={(0, 1): 1, (1, 0): 1}), stages_per_worker=[1])
    assert all(validate(x.schedule) == [] for x in found)


def test_costs_may_depend_on_the_number_of_stages():
    """Stage 0 has no useful I, however many stages there are."""

    def costs(v):
        rest = [1 / v] * (4 * v - 1)
        return Costs(F=1 / v, I=[0, *rest], W=[2 / v, *rest], activation=1 / v)

    found = best(4, 16, costs)
    assert found[0].report.makespan == 48.75
    for candidate in found:
        assert candidate.costs == costs(len(candidate.schedule.placement) // 4)


def test_gaps_are_to_what_fits():
    for candidate in best(4, 8, Costs(R=10), capacity=1):
        made, costs = candidate.schedule, candidate.costs
        limit = bounds(made.placement, 8, costs, capacity=1)
        assert candidate.gap == limit.gap(candidate.report)
