"""The example of pictures, which ends the demo."""

import pytest
import torch

from examples import pictures
from torchgpipe.testing import UnavailableError


def test_main(devices, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pictures, "load", lambda count: devices[:count])
    monkeypatch.setattr(pictures, "STEPS", 1)
    assert pictures.main(["--folder", str(tmp_path), "--chunks", "8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step of ")
    assert "cpu (3)" in text
    rows = [line.split() for line in text.splitlines()]
    found = {row[0]: row for row in rows if row and row[0] in pictures.SCHEDULES}
    assert found.keys() == pictures.SCHEDULES.keys()
    # 1F1B keeps fewer micro-batches than GPipe.
    assert float(found["1F1B"][-1]) < float(found["GPipe"][-1])
    assert "F3" in (tmp_path / "step.svg").read_text()
    drawn = (tmp_path / "schedules.svg").read_text()
    places = [drawn.index(f">{title}</text>") for title in pictures.SCHEDULES]
    assert places == sorted(places)


@pytest.mark.usefixtures("devices")
def test_without_a_compiler(monkeypatch, capsys, tmp_path):
    def load(count):
        raise UnavailableError("there is no compiler")

    monkeypatch.setattr(pictures, "load", load)
    monkeypatch.setattr(pictures, "places", lambda count: [torch.device("cpu")] * count)
    assert pictures.main(["--folder", str(tmp_path), "--chunks", "2"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("there is no compiler")
    assert [x.name for x in tmp_path.iterdir()] == ["step.svg"]
