"""Training plain and under GPipe gives the same results, at tiny size."""

import json

from benchmarks.report.files import RESULTS
from benchmarks.suites.tables.transparency import compared
from benchmarks.suites.transparency import summarise


def test_noise():
    assert compared([98.0, 99.0], [97.0, 99.0]) == ("+0.50", "+0.45", "yes")
    assert compared([90.0, 91.0], [97.0, 99.0]) == ("-7.50", "-6.71", "no")
    assert compared([98.0], [97.0]) == ("+1.00", "", "")
    assert compared([98.0, 98.0], [98.0, 98.0]) == ("+0.00", "+0.00", "yes")
    assert compared([98.0, 98.0], [97.0, 97.0]) == ("+1.00", "+inf", "no")


def test_default_result():
    path = RESULTS / "transparency.json"
    result = json.loads(path.read_text("utf-8"))
    exact = [x for x in result["rows"] if x["part"] == "exact"]
    assert exact
    assert all(x["loss_difference"] < 1e-9 for x in exact)
    # Whether a difference of accuracies is noise is up to chance.
    for table in summarise(result).tables[:2]:
        column = [row[-1] for row in table.rows]
        assert table.head[-1].endswith("bit for bit")
        assert "yes" in column
        assert "no" not in column
