"""Skips: edges from a stage to a later one, and back for gradients."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import examples, random_costs, random_skips, schedules, with_copies
from torchgpipe.schedule import (
    Costs,
    Op,
    Schedule,
    bounds,
    greedy,
    one_f_one_b,
    parse,
    read_csv,
    simulate,
    validate,
    write_csv,
)
from torchgpipe.schedule.program import by_stage, needs, operations_of, walk


def test_edges_of_a_skip():
    ops = {*operations_of(one_f_one_b(4, 1).program)}
    skips = ((0, 2), (0, 1))
    assert needs(Op(2, "F", 0), ops, skips) == [Op(1, "F", 0), Op(0, "F", 0)]
    assert needs(Op(1, "F", 0), ops, skips) == [Op(0, "F", 0)]
    assert needs(Op(0, "B", 0), ops, skips) == [Op(0, "F", 0), Op(1, "B", 0), Op(2, "B", 0)]
    assert needs(Op(2, "B", 0), ops, skips) == [Op(2, "F", 0), Op(3, "B", 0)]


def test_gradient_of_a_skip_may_come_from_half_a_backward():
    ops = {*operations_of(one_f_one_b(3, 1).split().program)}
    assert Op(2, "I", 0) in needs(Op(0, "I", 0), ops, ((0, 2),))
    assert needs(Op(0, "W", 0), ops, ((0, 2),)) == [Op(0, "I", 0)]


def test_copy_of_a_skip_takes_time():
    schedule = replace(one_f_one_b(3, 1), skips=((0, 2),))
    costs = Costs(copy={(0, 1): 0, (1, 2): 0, (1, 0): 0, (2, 1): 0, (0, 2): 5, (2, 0): 7})
    report = simulate(schedule, costs)
    assert report.start[Op(2, "F", 0)] == 6
    assert report.start[Op(0, "B", 0)] == 9 + 7
    assert report.makespan == 18
    split = simulate(schedule.split(), costs)
    assert split.makespan == bounds((0, 1, 2), 1, costs, skips=((0, 2),)).makespan == 17


def test_one_number_counts_for_skips():
    assert simulate(replace(one_f_one_b(2, 1), skips=((0, 1),)), Costs(copy=1)).makespan == 8


def test_missing_cost_of_a_skip():
    schedule = replace(one_f_one_b(3, 1), skips=((0, 2),))
    costs = Costs(copy={(0, 1): 0, (1, 2): 0, (1, 0): 0, (2, 1): 0})
    with pytest.raises(ValueError, match=r"copy of \(0, 2\)"):
        simulate(schedule, costs)


@pytest.mark.parametrize("skip", [(0, 0), (1, 0), (0, 2), (-1, 1)])
def test_skip_must_lead_to_a_later_stage(skip):
    with pytest.raises(ValueError, match="a skip must lead from a stage to a later one"):
        replace(one_f_one_b(2, 1), skips=(skip,))


@pytest.mark.parametrize("skips", [5, (0, 1), ((0, 1, 2),), ((0, 1.0),), ((False, 1),), ("01",)])
def test_skips_are_pairs_of_integers(skips):
    with pytest.raises(TypeError, match=r"skips must be pairs of stages .*; pass"):
        replace(one_f_one_b(3, 1), skips=skips)


def test_files_have_no_skips(tmp_path):
    schedule = replace(one_f_one_b(3, 2), skips=((0, 2),))
    write_csv(schedule, tmp_path / "file.csv")
    plain = replace(schedule, skips=())
    assert read_csv(tmp_path / "file.csv", schedule.placement, 2) == plain
    assert parse(str(schedule), schedule.placement, 2) == plain


def test_order_and_number_of_skips_do_not_matter():
    a, b = (
        Schedule((0,) * 3, 1, one_f_one_b(1, 1).program, skips)
        for skips in ([(1, 2), (0, 1)], [(0, 1), (1, 2), (0, 1)])
    )
    assert a == b


def test_rewriting_keeps_skips():
    schedule = replace(one_f_one_b(3, 4), skips=((0, 2),))
    for found in (
        schedule.split(),
        schedule.recompute(),
        schedule.first(2),
    ):
        assert found.skips == ((0, 2),)


@examples
@given(schedules(), st.integers(0, 2**32))
def test_skips_without_a_cost_change_nothing(case, seed):
    schedule, costs = case
    costs = replace(costs, copy=0)
    skips = random_skips(random.Random(seed), len(schedule.placement))
    plain, found = (simulate(replace(schedule, skips=x), costs) for x in ((), skips))
    assert (found.start, found.end) == (plain.start, plain.end)
    assert not validate(replace(schedule, skips=skips))


@examples
@given(schedules(), st.integers(0, 2**32))
def test_skips_of_a_stage_suffice_for_its_needs(case, seed):
    schedule, _ = case
    skips = random_skips(random.Random(seed), len(schedule.placement))
    near = by_stage(skips)
    ops = {*operations_of(schedule.program)}
    for op in ops:
        assert needs(op, ops, near.get(op.stage, ())) == needs(op, ops, skips)


class Counted(tuple):
    """Skips that count how often somebody looks through them."""

    count = 0

    def __iter__(self):
        Counted.count += 1
        return super().__iter__()


def test_nobody_looks_through_all_skips_for_each_computation():
    schedule = one_f_one_b(8, 8)
    skips = Counted((j, 7 - j) for j in range(4))
    assert [*walk(schedule.program, lambda waiting: None, skips)]
    assert Counted.count <= 2


@examples
@given(schedules(), st.integers(0, 2**32))
def test_no_schedule_is_below_the_bounds(case, seed):
    schedule, costs = case
    rng = random.Random(seed)
    skips = random_skips(rng, len(schedule.placement))
    costs = with_copies(rng, costs, schedule.placement, skips)
    schedule = replace(schedule, skips=skips)
    report = simulate(schedule, costs)
    limit = [max(x, 1) for x in report.peak]
    found = bounds(schedule.placement, schedule.chunks, costs, limit, skips)
    assert report.makespan >= found.makespan


@examples
@given(st.integers(0, 2**32))
def test_greedy_with_skips(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 5)
    placement = [*range(rng.randint(1, n))]
    placement += rng.choices(placement, k=n - len(placement))
    skips = random_skips(rng, n)
    costs = with_copies(rng, random_costs(rng, n), placement, skips)
    schedule = greedy(
        placement, 3, lambda op: (op.microbatch, op.stage), split=True, costs=costs, skips=skips
    )
    assert schedule.skips == tuple(sorted(skips))
    assert not validate(schedule)
    # It starts each computation as soon as its inputs have arrived, as it believed.
    assert simulate(schedule, costs).makespan >= bounds(placement, 3, costs, None, skips).makespan
