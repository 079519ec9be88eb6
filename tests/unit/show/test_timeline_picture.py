"""The rows and bars of a step, and the picture as PNG."""

import struct
import sys

import pytest

from tests.unit.show.cases import A, step
from torchgpipe.show.span import computation
from torchgpipe.show.timeline import panel, png


def test_rows():
    found = panel(step(), "ms")
    assert [row.name for row in found.rows] == ["cuda:0", "cuda:1"]
    assert found.stop == 8
    first, second = ([bar.kind for bar in row.bars] for row in found.rows)
    assert (first, second) == (["F", "F", "B"], ["F", "R", "B", "copy"])
    assert found.rows[0].bars[2].tip == "0B0 from 6 to 8 ms"


def test_overlaps_share_the_height():
    spans = [computation(A, 0, 4, (0, "F", 1)), computation(A, 0, 3, (1, "B", 0))]
    (row,) = panel(spans, "").rows
    assert [bar.part for bar in row.bars] == [(0, 2), (1, 2)]
    assert [bar.tone for bar in row.bars] == [0, 0.5]


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    png(tmp_path / "step.png", [panel(step(), "ms")] * 2)
    head = (tmp_path / "step.png").read_bytes()
    assert head[:4] == b"\x89PNG"
    assert struct.unpack(">I", head[16:20])[0] > 1000


def test_png_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        png(tmp_path / "step.png", [])
