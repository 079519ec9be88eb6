"""The rows and bars of a step."""

from tests.unit.show.cases import A, step
from torchgpipe.show.span import computation
from torchgpipe.show.timeline import panel


def test_rows():
    found = panel(step(), "ms")
    assert [*found.rows] == ["cuda:0", "cuda:1"]
    assert found.stop == 8
    first, second = ([bar.kind for bar in row] for row in found.rows.values())
    assert (first, second) == (["F", "F", "B"], ["F", "R", "B", "copy"])
    assert found.rows["cuda:0"][2].tip == "0B0 from 6 to 8 ms"


def test_overlaps_share_the_height():
    spans = [computation(A, 0, 4, (0, "F", 1)), computation(A, 0, 3, (1, "B", 0))]
    (row,) = panel(spans, "").rows.values()
    assert [bar.part for bar in row] == [(0, 2), (1, 2)]
    assert [bar.tone for bar in row] == [0, 0.5]
