"""Rivals are installed apart, and answer requests; a rival that fails is left out with a reason."""

import io
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.rivals import library, processes
from tests.support.size import soak
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("prompt")


def answers(*requests):
    found = io.StringIO()
    devices = [torch.device("cpu")] * 2
    lines = io.StringIO("".join(json.dumps(x) + "\n" for x in requests))
    library.serve(library.Library(GPipe, devices), lines, found)
    return [json.loads(line) for line in found.getvalue().splitlines()]


def test_requests():
    setting = {"n": 2, "m": 2, "mode": "always", "kind": "training"}
    made, measured = answers(
        {"make": "benchmarks.rivals.cells:Cells", "arguments": setting},
        {"call": "measure", "arguments": {"seconds": 0}},
    )
    assert made == {"value": None}
    assert set(measured["value"]) == {"plain", "pipeline"}


def test_errors_are_answers():
    wrong = {"n": 2, "m": 2, "mode": "sometimes", "kind": "training"}
    made, called = answers(
        {"make": "benchmarks.rivals.cells:Cells", "arguments": wrong},
        {"call": "measure", "arguments": {"seconds": 0}},
    )
    assert "sometimes" in made["error"]
    assert "AttributeError" in called["error"]


def test_wrong_gradients_are_no_result():
    class Wrong(torch.nn.Module):
        def __init__(self, layers, balance, **options):
            super().__init__()
            self.layers = layers

        def forward(self, input):
            return self.layers(input.detach()) * 2 - self.layers(input).detach()

    cells = {"n": 1, "m": 2, "mode": "never", "kind": "training"}
    wrong = library.Library(Wrong, [torch.device("cpu")])
    found = io.StringIO()
    request = json.dumps({"make": "benchmarks.rivals.cells:Cells", "arguments": cells})
    library.serve(wrong, io.StringIO(request), found)
    assert "computes something else" in json.loads(found.getvalue())["error"]


def test_install(monkeypatch, tmp_path):
    def run(command, **options):
        folder = processes.Path(command[command.index("--target") + 1])
        (folder / "torchgpipe").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(processes, "INSTALLED", tmp_path)
    monkeypatch.setattr("subprocess.run", run)
    rival = processes.installed("0.0.7")
    assert rival == processes.Rival(
        "0.0.7", "torchgpipe", tmp_path / "torchgpipe==0.0.7", "torchgpipe==0.0.7"
    )
    assert (rival.folder / "torchgpipe").is_dir()
    monkeypatch.delattr("subprocess.run")
    assert processes.installed("0.0.7") == rival


def test_install_fails(monkeypatch, tmp_path):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "one\nno network\n")

    monkeypatch.setattr(processes, "INSTALLED", tmp_path)
    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(processes.UnavailableError, match=r"\(no network\); to try by hand: pip"):
        processes.installed("fairscale")
    assert not list(tmp_path.iterdir())


def test_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(RuntimeError, match="another torchgpipe was imported"):
        library.load("torchgpipe", tmp_path, "cpu", 1)


@soak
def test_a_process_that_cannot_start(tmp_path):
    empty = processes.Rival("empty", "torchgpipe", tmp_path, None)
    running = processes.Running(empty, "cpu", 1)
    with (
        pytest.raises(processes.UnavailableError, match="another torchgpipe was imported"),
        running,
    ):
        pass
    assert running.process.returncode == 0
