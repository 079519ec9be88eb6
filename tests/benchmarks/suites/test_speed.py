"""The benchmark of throughput side by side, at tiny size."""

import json
from importlib import import_module

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.models import experiments
from benchmarks.models.experiments import Experiment
from benchmarks.report.machine import ROOT
from benchmarks.rivals.library import Library
from benchmarks.rivals.processes import Rival, UnavailableError
from benchmarks.suites import speed
from benchmarks.suites.speed import parser, settings
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("prompt")

TINY = {"name": "unet", "depth": 1, "num_convs": 1, "base_channels": 4}


class Here:
    """A rival in this process, where it needs none of its own."""

    def __init__(self, name):
        self.rival = Rival(name, ROOT, None)

    def make(self, subject, **arguments):
        module, _, name = subject.partition(":")
        library = Library(GPipe, [torch.device("cpu")] * 2)
        try:
            self.subject = getattr(import_module(module), name)(library, **arguments)
        except ValueError as error:
            raise UnavailableError(str(error)) from error

    def call(self, method, **arguments):
        return getattr(self.subject, method)(**arguments)


def test_speed(tmp_path, monkeypatch, capsys):
    pipelines = [Experiment("n1m2", TINY, 8, 4, 1, 2), Experiment("n2m1", TINY, 8, 4, 2, 1)]
    monkeypatch.setattr(speed, "SPEED", {"unet": pipelines})
    started = []

    def start(stack, names, against, device, count, threads):
        started.append((names, count, threads))
        return [Here(name) for name in names[:2]], {"0.0.7": "cannot be had"}

    monkeypatch.setattr(speed, "start", start)
    path = tmp_path / "speed.json"
    names = ["ours", "0.0.7"]
    few = ["--modes", "paper", "--rounds", "2", "--scale", "1", "8", "4", "--threads", "1"]
    assert main(["speed", *few, "--rivals", *names, "--output", str(path)]) == 0
    assert started == [(["baseline", *names], 2, 1)]
    result = json.loads(path.read_text("utf-8"))
    first, second = result["rows"]
    for row, bubble in [(first, 0), (second, 0.5)]:
        assert row["bubble"] == bubble
        assert row["rivals"]["baseline"]["speed_up"] == 1
        assert row["rivals"]["ours"]["ours_over"] == 1
        assert all(len(x["rounds"]) == 2 for x in row["rivals"].values())
    printed = capsys.readouterr().out
    assert "| unet/n2m1  |   2 |   1 |" in printed
    assert "Not run: 0.0.7: cannot be had" in printed


def test_default_settings(monkeypatch):
    monkeypatch.setattr(speed, "layer_costs", lambda experiment: [1.0] * 64)
    found = settings(parser().parse_args([]))
    assert len(found) == 2 * (4 + 4 + 9)
    assert {x.experiment.mode for x in found} == {"never", "except_last", "always"}
    assert all(x.experiment.batch % x.experiment.m == 0 for x in found)
    assert all(sum(x.balance) == 64 for x in found)
    (full,) = settings(
        parser().parse_args(
            ["--device", "cuda", "--experiments", "amoebanetd/n4m4", "--modes", "paper"]
        )
    )
    assert full.experiment == experiments.SPEED["amoebanetd"][4]
    # The paper has no such baseline.
    assert (full.baseline.batch, full.baseline.m) == (48, None)


def test_ratios():
    found = speed.figures({"baseline": [1.0], "ours": [2.0], "x": [4.0]})
    figures = {name: [*row.values()] for name, row in found.items()}
    assert figures == {
        "baseline": [1.0, 1.0, 2.0, [1.0]],
        "ours": [2.0, 2.0, 1.0, [2.0]],
        "x": [4.0, 4.0, 0.5, [4.0]],
    }
    assert [*found["x"]] == ["throughput", "speed_up", "ours_over", "rounds"]
    # A slow round slows all of its steps down alike.
    found = speed.figures({"baseline": [1.0, 5.0, 2.0], "ours": [2.0, 10.0, 8.0]})
    assert [*found["ours"].values()] == [8.0, 2.0, 1.0, [2.0, 10.0, 8.0]]
    assert found["baseline"]["ours_over"] == 2.0
    (alone,) = speed.figures({"x": [1.0]}).values()
    assert (alone["speed_up"], alone["ours_over"]) == (None, None)
