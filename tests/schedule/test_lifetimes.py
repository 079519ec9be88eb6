"""Lifetimes of what a worker keeps, and the fewest slots for them."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from tests.schedule.cases import BUILT_IN, examples, schedules
from torchgpipe.schedule import Costs, Lifetime, Overlap, parse
from torchgpipe.schedule.costs import Table


def test_by_hand():
    schedule = parse("0F0 0F1 0I0 0R1 0W0 0I1 0W1", [0], 2)
    (found,) = schedule.lifetimes()
    assert found.all == (
        Lifetime(0, 0, "activation", 0, 2, 0),
        Lifetime(0, 1, "checkpoint", 1, 3, 0),
        Lifetime(0, 0, "pending", 2, 4, 0),
        Lifetime(0, 1, "activation", 3, 5, 0),
        Lifetime(0, 1, "pending", 5, 6, 0),
    )
    assert found.slots == {(0, kind): 1 for kind in ("activation", "checkpoint", "pending")}


def test_an_instruction_does_not_write_over_what_it_reads():
    (found,) = parse("0F0 (0F1;0B0) 0B1", [0], 2).lifetimes()
    assert [x.slot for x in found.all] == [0, 1]
    (found,) = parse("0F0 0B0 0F1 0B1", [0], 2).lifetimes()
    assert [x.slot for x in found.all] == [0, 0]


def test_forward_alone_keeps_nothing():
    for text in ("0F0 0F1", "0F0 0R0 0F1"):
        assert parse(text, [0], 2).lifetimes() == (((), {}),)


def test_what_has_no_backward_is_kept_until_the_end():
    first, second = parse("0F0 0F1 0B0\n1F0 1F1", [0, 1], 2).lifetimes()
    assert [(x.start, x.end, x.slot) for x in first.all] == [(0, 2, 0), (1, 2, 1)]
    assert [(x.start, x.end, x.slot) for x in second.all] == [(0, 1, 0), (1, 1, 1)]
    (found,) = parse("0F0 0F1 0R0 0I1 0F2", [0], 3).lifetimes()
    assert [x[1:5] for x in found.all] == [
        (0, "checkpoint", 0, 2),
        (1, "activation", 1, 3),
        (0, "activation", 2, 4),
        (1, "pending", 3, 4),
        (2, "activation", 4, 4),
    ]


def test_slots_of_an_overlap():
    """The two computations read and write at the same time, whatever their order."""
    for pair in ("(0W0;0I1)", "(0I1;0W0)"):
        (found,) = parse(f"0F0 0F1 0I0 {pair} 0W1", [0], 2).lifetimes()
        assert found.slots[0, "pending"] == 2
    (found,) = parse("0F0 0F1 0I0 0W0 0I1 0W1", [0], 2).lifetimes()
    assert found.slots[0, "pending"] == 1


def test_a_slot_is_used_again_as_soon_as_possible():
    """The lowest free slot is taken."""
    (found,) = parse("0F0 0F1 0F2 0B1 0B0 0F3 0B2 0F4 0B3 0B4", [0], 5).lifetimes()
    assert [(x.microbatch, x.slot) for x in found.all] == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]


def verify(schedule):
    for line, (found, slots) in zip(schedule.program, schedule.lifetimes()):
        groups = {}
        for x in found:
            groups.setdefault((x.stage, x.kind), []).append(x)
        assert groups.keys() == slots.keys()
        for key, some in groups.items():
            alive = Counter(place for x in some for place in range(x.start, x.end + 1))
            # As few as there are kept at once.
            assert slots[key] == max(alive.values())
            assert {x.slot for x in some} == {*range(slots[key])}
            places = Counter((x.slot, k) for x in some for k in range(x.start, x.end + 1))
            assert max(places.values()) == 1
        assert all(0 <= x.start < x.end < len(line) for x in found)


def verify_costs(schedule):
    """The most that a worker keeps of one stage and kind takes as many slots."""
    stages = range(len(schedule.placement))
    for j in stages:
        for kind in ("activation", "pending", "checkpoint"):
            costs = Costs(activation=0, pending=0, checkpoint=0)
            costs = replace(costs, **{kind: [int(k == j) for k in stages]})
            w = schedule.placement[j]
            line = schedule.program[w]
            held = max(Table(costs, schedule.placement).held(line))
            slots = schedule.lifetimes()[w].slots.get((j, kind), 0)
            if kind == "activation" or not any(isinstance(x, Overlap) for x in line):
                assert slots == held
            # To costs, an overlap frees what R or W reads before it makes something else.
            assert slots >= held


def rewritten(schedule):
    yield schedule
    yield schedule.recompute()
    yield schedule.recompute(microbatches=0).split().defer_weights(2)
    yield schedule.overlap("FB", "FI", "FW")


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    for schedule in rewritten(BUILT_IN[name](4, 8)):
        verify(schedule)
        verify_costs(schedule)


@examples
@given(schedules())
def test_random(case):
    for schedule in rewritten(case[0]):
        verify(schedule)
        verify_costs(schedule)
