"""The benchmark of a cell's overhead, at tiny size."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.report.machine import ROOT
from tests.support.size import soak

pytestmark = pytest.mark.usefixtures("prompt")

TINY = ["--n", "2", "--m", "2", "--rounds", "2", "--seconds", "0.001", "--rivals", "ours"]


@pytest.fixture
def measured(tmp_path, capsys):
    """The result of the benchmark, and its output."""

    def measured(*options):
        path = tmp_path / "overhead.json"
        assert main(["overhead", *TINY, *options, "--output", str(path)]) == 0
        return json.loads(path.read_text("utf-8")), capsys.readouterr().out

    return measured


@pytest.mark.parametrize("others", [[], pytest.param(["same"], marks=soak)], ids=["ours", "same"])
def test_overhead(measured, tmp_path, others):
    against = [f"none={tmp_path}", *[f"{name}={ROOT}" for name in others]]
    result, printed = measured(*[x for text in against for x in ("--against", text)])
    assert result["machine"]["torch"]
    assert result["machine"]["threads"] == 1
    assert list(result["rivals"]) == ["ours", *others]
    assert "no checkout" in result["left_out"].pop("none")
    assert not result["left_out"]
    assert len(result["rows"]) == 1 + 3 + 3
    for row in result["rows"]:
        for found in row["rivals"].values():
            assert found["plain_min"] <= found["plain_median"]
    lines = [line.strip("| ").split() for line in printed.splitlines()]
    (head,) = [k for k, line in enumerate(lines) if line[:3] == ["n", "|", "m"]]
    for row, line in zip(result["rows"], lines[head + 2 :]):
        assert line[:8:2] == [str(row[key]) for key in ("n", "m", "kind", "mode")]
        for found in row["rivals"].values():
            assert f"{found['overhead_min']:.1f}" in line
    assert "Not run: none: this is no checkout" in printed
