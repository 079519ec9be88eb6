"""The picture in characters."""

from tests.unit.timeline.cases import A, step
from torchgpipe.timeline.span import computation
from torchgpipe.timeline.text import WIDTH, characters


def test_picture():
    head, *rows = characters(step()).splitlines()
    assert head == "time".ljust(8) + "".join(x.ljust(WIDTH // 4) for x in "0246") + "8"
    waits = [row[8:].count(".") for row in rows]
    assert waits == [WIDTH // 2, WIDTH // 2]


def test_columns_are_times():
    _, first, second = characters(step()).splitlines()
    for row, label, start in [(first, "F1", 1), (first, "B0", 6), (second, "R0", 2.5)]:
        assert row.index(label) == 8 + start * WIDTH / 8


def test_narrow_spans_show_their_kind():
    spans = [computation(A, k, k + 1, (0, "FB"[k % 2], k)) for k in range(WIDTH)]
    assert characters(spans).splitlines()[1].endswith("FB" * (WIDTH // 2))
