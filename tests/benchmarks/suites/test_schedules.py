"""The benchmark of schedules' throughput, at tiny size."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.suites import schedules
from tests.support.size import SOAK

pytestmark = pytest.mark.usefixtures("prompt")

#: Processes of torch.distributed take seconds to start.
CONTENDERS = schedules.CONTENDERS if SOAK else ("plain", "ours-1f1b")


def test_schedules(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schedules, "GPT", {"cpu": (8, 4, 1, 8, 2)})
    monkeypatch.setattr(schedules, "SLEEP", 1e-4)
    path = tmp_path / "schedules.json"
    few = ["--m", "4", "--rounds", "2", "--contenders", *CONTENDERS]
    assert main(["schedules", *few, "--output", str(path)]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert not result["left_out"]
    gpt, sleeping = result["rows"]
    assert tuple(gpt["seconds"]) == CONTENDERS
    known = [name for name in CONTENDERS if name.endswith(("fill_drain", "1f1b"))]
    assert list(sleeping["seconds"]) == known
    # (m + n - 1) forwards, and backwards of twice the time.
    assert sleeping["ideal"]["1f1b"] == pytest.approx(3e-4 * (4 + 4 - 1))
    assert all(len(times) == 2 for row in result["rows"] for times in row["seconds"].values())
    lines = [line.strip("| ").split() for line in capsys.readouterr().out.splitlines()]
    assert [line[4] for line in lines if line[:3] == ["2", "|", "4"]] == [*CONTENDERS]
    assert [line[4] for line in lines if line[:3] == ["4", "|", "4"]] == known
