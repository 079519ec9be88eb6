"""Dry runs as a page shows them, and the benchmark that predicts published tables."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.models.experiments import MEMORY, SPEED, amoebanetd, build
from benchmarks.suites import dry_run, large

PAGE = Path(__file__).parent.parent.parent / "docs" / "dry_run.rst"


def test_page(run, devices, capsys):
    names = run(PAGE)
    text = PAGE.read_text("utf-8")
    printed = capsys.readouterr().out.splitlines()
    assert all(line in text for line in printed[:3])
    assert next(line for line in printed if line.startswith("step of")) in text
    assert names["measured"] > names["predicted"].time


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


def test_settings():
    found = dry_run.settings(["memory", "speed"], 8)
    assert len(found) == sum(len(x) for kind in (MEMORY, SPEED) for x in kind.values())
    assert all(len(balance) == x.n for _, _, x, balance, _ in found if balance)
    assert [x[2].name for x in dry_run.settings(["memory"], 1)] == ["baseline", "pipeline-1"] * 2


@pytest.mark.parametrize("place", range(9))
def test_cells_of_an_amoebanet(place):
    layers = build(amoebanetd(18, 8))
    cells = dry_run.BALANCES["speed"]["amoebanetd"][place]
    balance = dry_run.layers_of(layers, cells)
    assert sum(balance) == len(layers)
    names = [name for name, _ in layers.named_children()]
    assert names[sum(balance[:1])].endswith(("_stash", "_current"))


def test_settings_of_large_models():
    for x in large.SETTINGS:
        if x.balance:
            assert len(x.balance) == x.n
            assert sum(x.balance) == large.LLAMA[x.model][2]
    assert {x.schedule for x in large.SETTINGS} == {"", "1f1b", "zbh1", "zbv", "dualpipev"}
