"""The benchmark of links, at tiny size."""

import json

from benchmarks.__main__ import main
from benchmarks.suites import links


def test_links(tmp_path, capsys):
    path = tmp_path / "links.json"
    few = ["--settings", "2x4", "4x16", "--schedules", "1f1b", "interleaved"]
    assert main(["links", *few, "--output", str(path)]) == 0
    rows = json.loads(path.read_text("utf-8"))["rows"]
    found = [(row["workers"], row["m"], row["schedule"]) for row in rows]
    assert found == [(2, 4, "1f1b"), (2, 4, "interleaved"), (4, 16, "1f1b"), (4, 16, "interleaved")]
    for row in rows:
        over = [*row["over"].values()]
        # The slower the link, the longer the step; and never less than its bytes take.
        assert over == sorted(over)
        assert all(row["over"][x] >= row["simulated"][x] >= 1 for x in links.LINKS)
    # Free copies: (m + n - 1) forwards and backwards.
    assert rows[2]["free"] == 3 * (16 + 3)
    assert "A message has 64 MiB" in capsys.readouterr().out
