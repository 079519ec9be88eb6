"""Benchmarks run on virtual accelerators, in processes of their own."""

import json

from benchmarks.overhead import main


def test_overhead(tmp_path):
    path = tmp_path / "overhead.json"
    size = ["--n", "2", "--m", "2", "--rounds", "1", "--seconds", "0.001"]
    main([*size, "--device", "virtual", "--rivals", "ours", "--output", str(path)])
    result = json.loads(path.read_text("utf-8"))
    assert result["machine"]["device"] == "virtual"
    assert not result["left_out"]
    assert [list(row["rivals"]) for row in result["rows"]] == [["ours"]] * 7
