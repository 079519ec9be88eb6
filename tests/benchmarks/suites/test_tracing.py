"""The benchmark of what a trace costs, at tiny size."""

import json

from benchmarks.__main__ import main
from benchmarks.suites import tracing
from benchmarks.suites.tracing import CONTENDERS


def test_tracing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracing, "GPT", (8, 4, 1, 8, 2))
    path = tmp_path / "tracing.json"
    assert main(["tracing", "--m", "2", "--rounds", "1", "--output", str(path)]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert [x["model"] for x in result["rows"]] == ["gpt"] * 4 + ["tiny"] * 4
    for row in result["rows"]:
        assert tuple(row["ratios"]) == CONTENDERS[1:]
        least, middle = row["without"]
        assert 0 < least <= middle
    assert "What a trace costs" in capsys.readouterr().out
