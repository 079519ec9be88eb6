"""The benchmark of the parts of a cell, at tiny size."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.suites import parts

pytestmark = pytest.mark.usefixtures("prompt")


@pytest.mark.parametrize("mode", ["inference", "always"])
def test_parts(mode, tmp_path, capsys):
    path = tmp_path / "parts.json"
    few = ["--n", "2", "--m", "2", "--steps", "2", "--modes", mode]
    assert main(["parts", *few, "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert sum(row["shares"].values()) == pytest.approx(1, abs=0.01)
    needed = {part for part, share in row["shares"].items() if share > 0}
    assert ("autograd's engine" in needed) == (mode == "always")
    assert mode != "always" or "recomputation" in needed
    assert f"{row['shares']['layers']:.1%}" in capsys.readouterr().out


def test_every_module_has_a_part():
    modules = {
        path.stem if path.is_file() else path.name
        for path in parts.PACKAGE.iterdir()
        if not path.stem.startswith("__") and path.name != "py.typed"
    }
    # These take no part in a step of GPipe.
    others = {"balance", "distributed", "graphs", "mapped", "mapped_gpipe"}
    others |= {"planner", "plans", "show", "tracing"}
    others |= {"schedule", "scheduled", "stream", "transformers"}
    assert modules - others - {"testing"} == {x for y in parts.PARTS.values() for x in y}
