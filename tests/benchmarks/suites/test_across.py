"""The benchmark of several processes, at tiny size."""

import json

from benchmarks.__main__ import main
from benchmarks.suites import across


def test_across(tmp_path, capsys):
    path = tmp_path / "across.json"
    sizes = ["--sizes", "2x8", "--m", "2", "--repeat", "2", "--schedules", "zbv"]
    assert main(["across", *sizes, "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert {*row["ms"]} == {"Pipe", "PyTorch", "one process"}
    assert all(0 < x["min"] <= x["median"] for x in row["ms"].values())
    printed = capsys.readouterr().out
    assert "throughput" in printed
    assert across.summarise(json.loads(path.read_text("utf-8"))).title in printed
