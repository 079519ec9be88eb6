"""Pieces of cells: a recomputation within a backward, and modules of one cell."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.show.cases import A, B
from torchgpipe.show.span import Span, Stream, cells, computation, copy, pieces


def times(spans):
    return [(x.kind, x.start, x.end) for x in spans]


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ((2, 4), [("B", 1, 2), ("R", 2, 4), ("B", 4, 6)]),
        ((1, 4), [("R", 1, 4), ("B", 4, 6)]),
        ((2, 6), [("B", 1, 2), ("R", 2, 6)]),
        ((0, 1), [("R", 0, 1), ("B", 1, 6)]),
    ],
)
def test_recomputation_within_backward(again, expected):
    spans = [computation(A, 1, 6, (0, "B", 0)), computation(A, *again, (0, "R", 0))]
    assert times(pieces(spans)) == expected


def test_other_cells_and_steps_are_left_alone():
    spans = [computation(A, 1, 6, (0, "B", 0)), computation(A, 2, 3, (0, "R", 1))]
    assert sorted(times(pieces(spans))) == sorted(times(spans))
    spans[1] = replace(computation(A, 2, 3, (0, "R", 0)), step=1)
    assert sorted(times(pieces(spans))) == sorted(times(spans))


def test_modules_of_one_cell_are_one_span():
    parts = [computation(A, k, k + 0.5, (0, "F", 0)) for k in range(3)]
    assert times(pieces(parts)) == [("F", 0, 2.5)]
    other = computation(A, 1.6, 1.8, (0, "F", 1))
    assert times(pieces([*parts, other])) == [("F", 0, 1.5), ("F", 1.6, 1.8), ("F", 2, 2.5)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_no_time_is_lost(cuts):
    inner = sorted({(2 * min(x), 2 * max(x) + 1) for x in cuts})
    inner = [x for k, x in enumerate(inner) if not any(y[1] > x[0] for y in inner[:k])]
    again = [computation(A, *x, (0, "R", 0)) for x in inner]
    found = pieces([computation(A, 0, 20, (0, "B", 0)), *again])
    assert sum(x.time for x in found) == 20
    assert all(x.end <= y.start for x, y in pairwise(found))


def test_operators_of_one_cell_are_one_span():
    lane = Stream("cuda:0", 7)

    def operator(name, stream, start, end, kind="", *where, layer="0"):
        stage, i, target = (*where, None, None, None)[:3]
        return Span(stream, start, end, name, 0, kind, stage, i, target, layer=layer)

    spans = [
        operator("addmm", A, 0, 1, "F", 0, 0),
        operator("tanh", A, 1, 2, "F", 0, 0, layer="1"),
        operator("copy to cuda:1", lane, 2, 3, "copy", 0, 0, 1, layer=""),
        operator("addmm", A, 2, 4, "F", 0, 1),
        operator("addmm", B, 3, 5, "F", 1, 0),
        operator("mse_loss", B, 5, 6, layer=""),
        operator("mm", B, 6, 8, "B", 1, 0),
    ]
    assert cells(spans) == [
        computation(A, 0, 2, (0, "F", 0)),
        # It is drawn where it arrives.
        copy(Stream("cuda:1", 7), 2, 3, 0, 1, 0),
        computation(A, 2, 4, (0, "F", 1)),
        computation(B, 3, 5, (1, "F", 0)),
        Span(B, 5, 6, "mse_loss"),
        computation(B, 6, 8, (1, "B", 0)),
    ]
