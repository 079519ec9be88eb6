"""The example of pictures, which ends the demo."""

import pytest
import torch

from examples import pictures, schedules
from torchgpipe.testing import UnavailableError


def test_main(devices, monkeypatch, capsys, tmp_path):
    for module in (pictures, schedules):
        monkeypatch.setattr(module, "load", lambda count: devices[:count])
    assert pictures.main(["--folder", str(tmp_path), "--chunks", "8"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    ms, bubble, mib = zip(*[row[1:] for row in rows if row and row[0] in pictures.SCHEDULES])
    # One table of costs: the first two differ in memory only, whatever else the machine does.
    assert ms == ("264", "264", "204")
    assert bubble == ("27.3%", "27.3%", "5.9%")
    assert float(mib[1]) < float(mib[0])
    assert "F0 F1 F2 F3 .................B0--- F4" in text
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
    text = capsys.readouterr().out
    assert text.startswith("step of ")
    assert "cpu (3)" in text
    assert text.rstrip().endswith("there is no compiler")
    assert [x.name for x in tmp_path.iterdir()] == ["schedules.svg"]
