"""The language: values, text, and errors in the text."""

import dataclasses

import pytest
from hypothesis import given

from tests.schedule.cases import examples, schedules
from torchgpipe.schedule import Op, Overlap, Schedule, parse

LINES = ((Op(0, "F", 0), Op(0, "B", 0)), (Overlap(Op(1, "F", 0), Op(1, "B", 0)),))


@examples
@given(schedules())
def test_text_and_back(case):
    schedule, _ = case
    assert parse(str(schedule), schedule.placement, schedule.chunks) == schedule
    assert len(str(schedule).splitlines()) == len(schedule.program)


def test_spelling():
    assert str(Op(2, "F", 0)) == "2F0"
    assert str(Overlap(Op(0, "F", 1), Op(3, "B", 0))) == "(0F1;3B0)"
    schedule = parse("\n\n  0F0\t0R0  10I12 (0F1;1B0)\r\n", [0, 0], 2)
    assert schedule.program == (
        (Op(0, "F", 0), Op(0, "R", 0), Op(10, "I", 12), Overlap(Op(0, "F", 1), Op(1, "B", 0))),
    )


def test_values():
    schedule = Schedule([0, 1], 1, [list(line) for line in LINES])
    assert schedule == Schedule((0, 1), 1, LINES)
    assert hash(schedule) == hash(Schedule((0, 1), 1, LINES))
    assert schedule != Schedule((0, 1), 2, LINES)
    assert eval(repr(schedule)) == schedule
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.chunks = 2


@pytest.mark.parametrize(
    ("text", "line", "column", "what"),
    [
        ("0F0 1X0", 1, 6, "F, B, I, W or R"),
        ("0F0\n\n   F0", 3, 4, "a stage"),
        ("0F0\n0F", 2, 3, "a micro-batch"),
        ("02F0", 1, 2, "F, B, I, W or R"),
        ("0F00", 1, 4, "a space"),
        ("0F0,0B0", 1, 4, "a space"),
        ("0f0", 1, 2, "F, B, I, W or R"),
        ("(0F1; 3B0)", 1, 6, "a stage"),
        ("(0F1)", 1, 5, ";"),
        ("(0F1;3B0", 1, 9, r"\)"),
        ("(0F1;3B0)OVERLAP_F_B", 1, 10, "a space"),
        ("-1F0", 1, 1, "a stage"),
        ("٣F0", 1, 1, "a stage"),
        ("0F0 0B٣", 1, 7, "a micro-batch"),
    ],
)
def test_faults_of_text_are_placed(text, line, column, what):
    message = rf"^{what} must come next \(line: {line}, column: {column}, found: .*\); write"
    with pytest.raises(ValueError, match=message):
        parse(text, [0], 1)


@pytest.mark.parametrize(
    ("placement", "chunks", "program", "error"),
    [
        ((0, 1), 0, LINES, ValueError),
        ((0, 2), 1, LINES, ValueError),
        ((0, 0), 1, LINES, ValueError),
        ((0, 1), 1, LINES[:1], ValueError),
        ((), 1, (), ValueError),
        ((0, 1), 1.0, LINES, TypeError),
        ((0, True), 1, LINES, TypeError),
        ((0, "1"), 1, LINES, TypeError),
        ((0, 1), 1, (LINES[0], ("1F0",)), TypeError),
        ((0, 1), 1, (LINES[0], ((1, "F", 0),)), TypeError),
        ((0, 1), 1, (LINES[0], (Op(1, "X", 0),)), TypeError),
        ((0, 1), 1, (LINES[0], (Op(1, "F", 0.0),)), TypeError),
        ((0, 1), 1, (LINES[0], (Overlap(Op(1, "F", 0), None),)), TypeError),
    ],
)
def test_parts_must_fit(placement, chunks, program, error):
    with pytest.raises(error, match=r"must .*\(.*\); "):
        Schedule(placement, chunks, program)


def test_parse_checks_the_parts_too():
    with pytest.raises(ValueError, match="lines: 1"):
        parse("0F0 0B0", [0, 1], 1)
