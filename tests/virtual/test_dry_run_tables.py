"""The benchmark that predicts published tables by dry runs."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.suites import dry_run


def test_tables(devices, tmp_path, capsys, monkeypatch):
    def here(function, *args):
        return {**function(*args), "processor": 0.0, "rss": 0}

    monkeypatch.setattr(dry_run, "alone", here)
    path = tmp_path / "dry_run.json"
    few = ["--kinds", "speed", "--models", "unet", "--most", "1"]
    assert main(["dry_run", *few, "--output", str(path)]) == 0
    plain, pipeline = json.loads(path.read_text("utf-8"))["rows"]
    assert plain["fits"]
    assert pipeline["m"] == 2
    # What a checkpoint computes again: published as 0.858.
    rate = pipeline["batch"] / pipeline["seconds"] * plain["seconds"] / plain["batch"]
    assert rate == pytest.approx(0.858, rel=0.1)
    printed = capsys.readouterr().out
    assert "Predicted and not measured" in printed
    assert "speed 2 of 2" in printed or "speed 1 of 1" in printed
