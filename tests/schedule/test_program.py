"""Needs between computations, and an order that respects them."""

import pytest
from hypothesis import given

from tests.schedule.cases import examples, schedules
from torchgpipe.schedule import Op, parse
from torchgpipe.schedule.program import needs, operations, operations_of, together, walk


def ops(text):
    return [op for word in text.split() for op in operations(parse(word, [0], 1).program[0][0])]


@pytest.mark.parametrize(
    ("op", "there", "expected"),
    [
        ("0F0", "0F0 0B0", ""),
        ("2F1", "1F1 1F0 2F0", "1F1"),
        ("2B1", "2F1 3B1 2F0", "2F1 3B1"),
        ("2B1", "2F1 3I1 3W1", "2F1 3I1"),
        ("2I1", "2F1 3B1 2W1", "2F1 3B1"),
        ("2B1", "2F1 2R1 3B1", "2F1 2R1 3B1"),
        ("2R1", "2F1 2B1 3B1", "2F1"),
        ("2W1", "2F1 2I1 3W1", "2I1"),
        ("3B1", "3F1 2B1", "3F1"),
        ("3B1", "2B1", ""),
    ],
)
def test_needs(op, there, expected):
    assert needs(*ops(op), {*ops(there)}) == ops(expected)


def test_together_is_the_inverse_of_operations():
    for instruction in parse("0F0 (0F1;0B0)", [0], 2).program[0]:
        assert together(operations(instruction)) == instruction


def never(waiting):
    raise AssertionError(waiting)


@examples
@given(schedules())
def test_walk_visits_all_in_order(case):
    schedule, _ = case
    done = set()
    lines = [[] for _ in schedule.program]
    for w, instruction, edges in walk(schedule.program, never):
        assert {source for source, _ in edges} <= done
        assert {target for _, target in edges} <= {*operations(instruction)}
        done |= {*operations(instruction)}
        lines[w].append(instruction)
    assert tuple(map(tuple, lines)) == schedule.program


def test_walk_asks_whom_to_free_when_all_are_stuck():
    program = parse("0B0 0F0\n1F0 1B0", [0, 1], 1).program
    asked = []

    def stuck(waiting):
        asked.append(dict(waiting))
        return 0

    assert {op for _, op, _ in walk(program, stuck)} == {*operations_of(program)}
    assert asked == [
        {0: (Op(0, "B", 0), Op(0, "F", 0)), 1: (Op(1, "F", 0), Op(0, "F", 0))},
    ]
    assert [*walk(program, lambda waiting: None)] == []
