"""The order in which a driver issues the instructions of a schedule."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import examples, random_skips, schedules, with_copies
from torchgpipe.schedule import Costs, interleaved, one_f_one_b, parse, simulate
from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.program import needs, operations, operations_of
from torchgpipe.schedule.rewrite import recomputes, with_modes
from torchgpipe.schedule.simulator import Rehearsal, in_order


@examples
@given(schedules(), st.integers(0, 2**32), st.sampled_from(["random", "one", "none"]))
def test_instructions_in_order(case, seed, kind):
    schedule, costs = case
    rng = random.Random(seed)
    schedule = replace(schedule, skips=random_skips(rng, len(schedule.placement)))
    if kind == "random":
        costs = with_copies(rng, costs, schedule.placement, schedule.skips)
    else:
        costs = Costs() if kind == "one" else Costs(F=0, I=0, W=0, R=0)
    order = in_order(schedule, costs)
    ops = {*operations_of(schedule.program)}
    done = set()
    lines = [[] for _ in schedule.program]
    for w, instruction, edges in order:
        parts = operations(instruction)
        assert edges == [(x, op) for op in parts for x in needs(op, ops, schedule.skips)]
        assert {source for source, _ in edges} <= done
        done |= {*parts}
        lines[w].append(instruction)
    # All of them, once, and those of each worker in its order.
    assert tuple(map(tuple, lines)) == schedule.program
    start = simulate(schedule, costs).start
    starts = [start[operations(x)[0]] for _, x, _ in order]
    assert starts == sorted(starts)


def test_of_equal_starts_the_first_worker_goes_first():
    for schedule in (one_f_one_b(4, 8), interleaved(4, 8)):
        start = simulate(schedule).start
        places = [(start[operations(x)[0]], w) for w, x, _ in in_order(schedule)]
        assert places == sorted(places)


def test_what_takes_no_time_still_comes_before_what_needs_it():
    schedule = parse("1F0 1B0\n0F0 0B0", [1, 0], 1)
    order = [str(x) for _, x, _ in in_order(schedule, Costs(F=0, I=0, W=0))]
    assert order == ["0F0", "1F0", "1B0", "0B0"]


def test_forward_alone_has_an_order():
    """A driver without gradients runs the forwards of a schedule, which are no valid schedule."""
    program = tuple(
        tuple(op for op in line if op.kind == "F") for line in one_f_one_b(2, 2).program
    )
    order = in_order(replace(one_f_one_b(2, 2), program=program))
    assert [str(x) for _, x, _ in order] == ["0F0", "0F1", "1F0", "1F1"]


@examples
@given(schedules(), st.integers(0, 2**32))
def test_recomputations_that_are_added_to_what_was_rehearsed(case, seed):
    schedule, costs = case
    rng = random.Random(seed)
    skips = random_skips(rng, len(schedule.placement))
    modes = [rng.choice(["never", "except_last", "always"]) for _ in schedule.placement]
    program = with_modes(schedule.program, modes, schedule.chunks)
    if program is schedule.program:
        return
    table = Table(with_copies(rng, costs, schedule.placement, skips), schedule.placement, skips)
    plain, right = Rehearsal(schedule.program, skips), Rehearsal(program, skips)
    again = recomputes(schedule.program, modes, schedule.chunks)
    assert plain.makespan(table, again) == right.makespan(table)
