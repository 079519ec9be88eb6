"""The report of what a GPU says, rehearsed on virtual accelerators."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.suites import accelerators
from tests.support.size import soak
from tools import gpu

TINY = ["--device", "virtual", "--n", "2", "--m", "2", "--width", "8", "--rows", "2", "--steps"]


def test_checks(devices, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerators, "load", lambda count: None)
    monkeypatch.setattr(accelerators.torch.accelerator, "device_count", lambda: 2)
    # What it is when a process of its own predicts it is seen in the whole report.
    dry = {"step": "x", "ms": 2.0, "predicted_ms": 1.0, "gib": [1], "predicted_gib": [1]}
    monkeypatch.setattr(accelerators, "beside", lambda setting, name, hardware: dry)
    path = tmp_path / "accelerators.json"
    assert main(["accelerators", *TINY, "2", "--output", str(path)]) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["name"] for row in rows] == [*accelerators.MODES, *accelerators.SCHEDULES]
    for row in rows:
        assert row["difference"] < 1e-5
        assert row["same"]
        assert row["races"] == 0
        assert row["ms"] == pytest.approx(row["limit_ms"])
    assert "-50.0%" in capsys.readouterr().out


def test_a_part_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        gpu.PARTS, "steps", gpu.PARTS["steps"]._replace(virtual=["benchmarks", "nothing"])
    )
    options = ["--device", "virtual", "--folder", str(tmp_path)]
    assert gpu.main([*options, "--parts", "steps", "speed_ups"]) == 1
    (report,) = tmp_path.rglob("report.md")
    text = report.read_text("utf-8")
    assert "**It failed (status: 2).**" in text
    assert "`python -m benchmarks NAME --help` lists the options" in text
    assert "Only GPUs can answer this." in text


@soak
def test_report(tmp_path, capsys):
    assert gpu.main(["--device", "virtual", "--folder", str(tmp_path)]) == 0
    (report,) = tmp_path.rglob("report.md")
    text = report.read_text("utf-8")
    assert [f"## {part.question}" in text for part in gpu.PARTS.values()] == [True] * len(gpu.PARTS)
    # A step on virtual accelerators takes the very time that a dry run predicts.
    assert "equal layers" in text
    assert "+0.0%" in text
    capsys.readouterr()
    # What has ended is not run again.
    assert gpu.main(["--device", "virtual", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert report.read_text("utf-8") == text
