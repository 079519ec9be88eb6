"""The benchmark of throughput side by side, at tiny size."""

import io
import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.models import experiments
from benchmarks.models.experiments import Experiment, build
from benchmarks.report.machine import ROOT
from benchmarks.rivals.library import Library, serve
from benchmarks.rivals.plain import Accumulation, Replicas
from benchmarks.rivals.processes import Rival, UnavailableError
from benchmarks.rivals.training import Training
from benchmarks.suites import speed
from benchmarks.suites.speed import parser, settings, task
from torchgpipe import GPipe
from torchgpipe._torch.dynamo import VERSION

pytestmark = pytest.mark.usefixtures("prompt")

TINY = {"name": "unet", "depth": 1, "num_convs": 1, "base_channels": 4}


class Here:
    """A rival in this process, where it needs none of its own."""

    def __init__(self, name):
        self.rival = Rival(name, "torchgpipe", ROOT, None)

    def make(self, subject, **arguments):
        module, _, name = subject.partition(":")
        library = Library(GPipe, [torch.device("cpu")] * 2)
        try:
            self.subject = getattr(import_module(module), name)(library, **arguments)
        except ValueError as error:
            raise UnavailableError(str(error)) from error

    def call(self, method, **arguments):
        return getattr(self.subject, method)(**arguments)


@pytest.mark.skipif(VERSION < (2, 11), reason="gloo ends the processes of stages with PyTorch 2.9")
def test_speed(tmp_path, monkeypatch, capsys):
    pipelines = [Experiment("n1m2", TINY, 8, 4, 1, 2), Experiment("n2m1", TINY, 8, 4, 2, 1)]
    monkeypatch.setattr(speed, "SPEED", {"unet": pipelines})
    started = []

    def start(stack, names, against, device, count, threads):
        started.append((names, count, threads))
        return [Here(name) for name in names], {"0.0.7": "cannot be had"}

    monkeypatch.setattr(speed, "start", start)
    path = tmp_path / "speed.json"
    names = ["ours", "pipelining-1f1b", "accumulation", "DataParallel"]
    few = ["--modes", "paper", "--rounds", "2", "--scale", "1", "8", "4", "--threads", "1"]
    assert main(["speed", *few, "--rivals", *names, "--output", str(path)]) == 0
    assert started == [(["baseline", *names[:3]], 2, 1)]
    result = json.loads(path.read_text("utf-8"))
    first, second = result["rows"]
    for row, bubble in [(first, 0), (second, 0.5)]:
        assert row["bubble"] == bubble
        assert row["rivals"]["baseline"]["speed_up"] == 1
        assert row["rivals"]["ours"]["ours_over"] == 1
        assert all(len(x["rounds"]) == 2 for x in row["rivals"].values())
    assert "pipelining-1f1b" in first["rivals"]
    assert "as many micro-batches as stages" in second["failed"]["pipelining-1f1b"]
    printed = capsys.readouterr().out
    assert "| unet/n2m1  |   2 |   1 |" in printed
    assert "Not run: DataParallel: needs two GPUs" in printed
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


def test_tasks(monkeypatch):
    monkeypatch.setattr(speed, "layer_costs", lambda experiment: [1.0] * 64)
    chosen = ["--device", "cuda", "--experiments", "resnet101/pipeline-2", "--modes", "paper"]
    (setting,) = settings(parser().parse_args(chosen))
    assert task("baseline", setting)[1]["batch"] == 118
    assert task("ours", setting)[1]["batch"] == 25000
    # The rival needs micro-batches of one size, so 1667 of them have some rows more.
    assert task("pipelining-gpipe", setting)[1]["batch"] == 25005
    assert task("DataParallel", setting)[0] == "benchmarks.rivals.plain:Replicas"


def test_accumulation_has_the_gradients_of_the_mini_batch():
    library = Library(GPipe, [torch.device("cpu")])
    model = {**TINY, "dropout": 0.0}
    arguments = {"model": model, "size": 8, "batch": 5}
    one, other = (
        Training(library, **arguments),
        Accumulation(library, m=3, balance=[1], mode="never", **arguments),
    )
    for training in (one, other):
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
        training.step()
    for x, y in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(x, y)


def test_a_gpu_for_each_replica():
    library = Library(GPipe, [torch.device("cpu")] * 2)
    with pytest.raises(ValueError, match="each replica needs a GPU"):
        Replicas(library, model=TINY, size=8, batch=4, balance=[1, 1], m=1, mode="never")


def test_what_is_dropped_is_gone():
    requests = [
        {"make": "benchmarks.rivals.training:Training"},
        {"call": "parameters", "arguments": {}},
        {"drop": True},
        {"call": "parameters", "arguments": {}},
    ]
    requests[0]["arguments"] = {"model": TINY, "size": 8, "batch": 1}
    found = io.StringIO()
    lines = io.StringIO("".join(json.dumps(x) + "\n" for x in requests))
    serve(Library(GPipe, [torch.device("cpu")]), lines, found)
    made, counted, dropped, gone = map(json.loads, found.getvalue().splitlines())
    assert counted["value"] == sum(x.numel() for x in build(TINY).parameters())
    assert made == dropped == {"value": None}
    assert "AttributeError" in gone["error"]


@pytest.mark.parametrize("name", ["ablation", "memory", "one_gpu", "speed"])
def test_no_gpu(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([name, "--device", "cuda"])
    assert "there must be a GPU that CUDA knows (device: cuda)" in capsys.readouterr().err


class Fake:
    """The process of a rival on one GPU, on which some run out of memory."""

    def __init__(self, name):
        self.rival = type("Rival", (), {"name": name})
        self.asked = []

    def make(self, subject, **arguments):
        self.asked.append("make")
        if self.rival.name == "0.0.7":
            raise UnavailableError("Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried")

    def call(self, method, steps):
        self.asked.append(method)
        return [0.5] * steps

    def drop(self):
        self.asked.append("drop")


def test_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    pipeline = Experiment("pipeline-2", TINY, 8, 4, 2, 2)
    baseline = replace(pipeline, name="baseline", batch=1, n=1, m=None)
    setting = speed.Setting("unet", pipeline, baseline, [1, len(build(TINY)) - 1])
    running = [Fake("baseline"), Fake("ours"), Fake("0.0.7")]
    options = parser().parse_args(["--device", "cuda", "--rounds", "2"])
    row = speed.measure(running, setting, options)
    # One at a time has memory there.
    assert running[1].asked == ["make", "seconds", "seconds", "drop"] * 2
    assert running[2].asked == ["make", "drop"]
    assert row["rivals"]["ours"]["speed_up"] == 4
    names = {x.rival.name: None for x in running}
    found = speed.summarise({"device": "cuda", "rivals": names, "rows": [row]})
    assert "streams" in found.notes
    assert found.tables[0].rows[0][:4] == ["unet/pipeline-2, shared", 2, 2, "except_last"]


def test_what_is_missing_is_told():
    rate = {"throughput": 1.0, "speed_up": None, "ours_over": None, "rounds": [1.0]}
    row = {"experiment": "unet/n2m2", "n": 2, "m": 2, "mode": "never"}
    row |= {"batch": 4, "devices": 2, "bubble": 1 / 3}
    first = {**row, "rivals": {"ours": rate}, "failed": {"0.0.7": "out of memory"}}
    second = {**row, "rivals": {"0.0.7": rate}, "failed": {}}
    result = {"device": "cuda", "rivals": {"ours": "", "0.0.7": ""}, "rows": [first, second]}
    rates, speed_ups, ratios = (table.rows for table in speed.summarise(result).tables)
    assert rates[0][5:] == ["1 (1 to 1)", "out of memory"]
    assert rates[1][5:] == [None, "1 (1 to 1)"]
    assert speed_ups[0][5:] == ["no baseline", "out of memory"]
    assert ratios[1][4:] == ["ours not run"]


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


def test_each_rival_has_its_column():
    rates = {"baseline": [10.0], "ours": [20.0], "0.0.7": [16.0], "accumulation": [8.0]}
    row = {"experiment": "unet/n2m2", "n": 2, "m": 2, "mode": "never", "batch": 4, "devices": 2}
    row |= {"bubble": 1 / 3, "rivals": speed.figures(rates), "failed": {}}
    found = speed.summarise({"device": "cuda", "rivals": rates, "rows": [row]})
    throughputs, speed_ups, ratios = found.tables
    assert [*throughputs.head[-4:]] == [*rates]
    assert throughputs.rows[0][-4:] == [
        "10 (10 to 10)",
        "20 (20 to 20)",
        "16 (16 to 16)",
        "8 (8 to 8)",
    ]
    assert [*speed_ups.head[-3:]] == ["ours", "0.0.7", "accumulation"]
    assert speed_ups.rows[0][-3:] == ["2.00 (100%)", "1.60 (80%)", "0.80 (40%)"]
    assert [*ratios.head[-3:]] == ["baseline", "0.0.7", "accumulation"]
    assert ratios.rows[0][-3:] == ["2.00", "1.25", "2.50"]
    (chart,) = found.charts
    assert chart.series == {"ours": [2.0], "0.0.7": [1.6], "accumulation": [0.8]}
