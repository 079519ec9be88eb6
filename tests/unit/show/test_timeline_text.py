"""The picture in characters."""

from tests.unit.show.cases import A, B, step
from torchgpipe.show.span import computation
from torchgpipe.show.timeline import WIDTH, characters


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


def test_spans_below_a_column_are_seen():
    spans = [computation(A, 0, 1000, (0, "F", 0)), computation(A, 1000, 1001, (0, "B", 0))]
    spans.append(computation(B, 500, 500.5, (1, "F", 0)))
    _, first, second = characters(spans).splitlines()
    assert first.endswith("B")
    assert second.count("F") == 1
