"""The benchmark of several processes, at tiny size."""

import json

import pytest
from torch.multiprocessing.spawn import start_processes

from benchmarks.__main__ import main
from benchmarks.suites import across
from tests.distributed.processes import OLD
from tests.support.fresh import METHOD, preload

preload("torch._dynamo", "torch.distributed.pipelining")


def start(*args, start_method, **options):
    """Start processes without an import of torch in each."""
    assert start_method == "spawn"
    return start_processes(*args, start_method=METHOD, **options)


@pytest.mark.skipif(bool(OLD), reason=OLD)
def test_across(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(across, "start_processes", start)
    path = tmp_path / "across.json"
    sizes = ["--sizes", "2x8", "--m", "2", "--repeat", "2", "--schedules", "zbv"]
    assert main(["across", *sizes, "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert {*row["ms"]} == {"Pipe", "PyTorch", "one process"}
    assert all(0 < x["min"] <= x["median"] for x in row["ms"].values())
    printed = capsys.readouterr().out
    assert "throughput" in printed
    assert across.summarise(json.loads(path.read_text("utf-8"))).title in printed
