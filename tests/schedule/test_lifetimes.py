"""Lifetimes of what a worker keeps, and the fewest slots for them."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from tests.schedule.cases import BUILT_IN, examples, schedules
from torchgpipe.schedule import Costs, Lifetime, named, parse
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


def test_one_f_one_b():
    found = named("1f1b", 4, 8).lifetimes()
    assert [x.slots for x in found] == [{(w, "activation"): 4 - w} for w in range(4)]


def test_forward_alone_keeps_nothing():
    assert parse("0F0 0F1", [0], 2).lifetimes()[0].all == ()


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


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    schedule = BUILT_IN[name](4, 8)
    verify(schedule)
    verify(schedule.recompute())


@examples
@given(schedules())
def test_random(given_):
    verify(given_[0] if isinstance(given_, tuple) else given_)


@pytest.mark.parametrize("name", ["1f1b", "zbh1", "fill_drain"])
@pytest.mark.parametrize("kind", ["activation", "pending", "checkpoint"])
def test_slots_are_what_costs_say(name, kind):
    """The most that a worker keeps of one kind takes as many slots."""
    schedule = named(name, 4, 8).recompute()
    costs = replace(Costs(activation=0, pending=0, checkpoint=0), **{kind: 1})
    table = Table(costs, schedule.placement)
    for w, found in enumerate(schedule.lifetimes()):
        most = max(table.held(schedule.program[w]))
        assert most == found.slots.get((w, kind), 0)
