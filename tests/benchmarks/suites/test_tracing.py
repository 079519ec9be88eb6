"""The benchmark of what a trace costs, at tiny size."""

import json

from benchmarks.__main__ import main
from benchmarks.suites import tracing
from benchmarks.suites.tracing import CONTENDERS, figures, summarise


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


def test_ratios():
    seconds = {"without": [1.0, 2.0, 4.0], "within": [1.5, 2.0, 8.0], "after": [1.0, 2.0, 4.0]}
    row = {"model": "gpt", "wrapper": "GPipe", "mode": "never", "m": 1000, **figures(seconds)}
    (table,) = summarise({"rows": [row]}).tables
    assert table.rows == [
        [
            "gpt",
            "GPipe",
            "never",
            1000,
            "1000.00 (2000.00)",
            "1.500 (1.500)",
            "1.000 (1.000)",
            "250",
        ]
    ]
