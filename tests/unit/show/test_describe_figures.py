"""Figures of the last step of a trace, and predictions that hold."""

from dataclasses import replace

import pytest

from torchgpipe.show.describe import CellTimes, PlanFigures, StepFigures
from torchgpipe.show.span import Stream, computation, copy
from torchgpipe.show.timeline import Timeline

A, B = Stream("a", 0), Stream("b", 0)


def timeline(*spans):
    return Timeline([*spans], memory={"a": 5})


def test_means_of_micro_batches():
    found = StepFigures.of(
        timeline(
            computation(A, 0, 1, (0, "F", 0)),
            computation(A, 1, 4, (0, "F", 1)),
            copy(B, 1, 2, 0, 1, 0),
            computation(B, 2, 3, (1, "F", 0)),
            # A backward that was cut in two, and one in two halves.
            computation(A, 4, 5, (0, "B", 1)),
            computation(A, 5, 6, (0, "R", 1)),
            computation(A, 6, 9, (0, "B", 1)),
            computation(B, 4, 5, (1, "I", 0)),
            computation(B, 5, 7, (1, "W", 0)),
        )
    )
    assert found.time == 9
    assert found.stages == {0: CellTimes(2, 1, 4), 1: CellTimes(1, None, 3)}
    assert found.places == {"a": found.stages[0], "b": found.stages[1]}
    assert found.memory == {"a": 5}


def test_partitions_of_a_device_add_up():
    spans = [computation(A, j + i, j + i + 1, (j, "F", i)) for j in (0, 2) for i in (0, 1)]
    found = StepFigures.of(timeline(*spans))
    assert found.stages == {0: CellTimes(1), 2: CellTimes(1)}
    assert found.places == {"a": CellTimes(2)}


def test_last_step():
    first = computation(A, 0, 1, (0, "F", 0))
    found = StepFigures.of(timeline(first, replace(first, start=3, end=6, step=1)))
    assert found.time == pytest.approx(3)
    assert found.stages == {0: CellTimes(3)}


def test_no_spans():
    assert StepFigures.of(timeline()) is None


@pytest.mark.parametrize(
    ("chunks", "modes", "schedule", "holds"),
    [
        (4, ["never"] * 2, "1f1b", True),
        (2, ["never"] * 2, "1f1b", False),
        (4, ["never", "always"], "1f1b", False),
        (4, ["never"] * 2, None, False),
    ],
)
def test_a_prediction_holds_for_its_settings(chunks, modes, schedule, holds):
    made = PlanFigures(1.0, {}, 4, ("never", "never"), "1f1b")
    assert made.holds(chunks, modes, schedule) == holds
