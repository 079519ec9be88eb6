"""The summary of the benchmark of graphs."""

from benchmarks.suites.graphs import STAGES, summarise


def test_summary():
    found = {
        f"{kind}, {stages}": {"min": own + ("linear" in kind) * extra, "median": 99.0}
        for kind in STAGES
        for stages, own, extra in (("eager", 50.0, 100.0), ("graph", 40.0, 50.0))
    }
    rows = [
        {"table": "host", "schedule": "zbh1", "mode": "never", "m": 16, "found": found},
        {"table": "overlaps", "schedule": "1F1B", "m": 4, "times": [10.0, 8.0], "hidden": 0.25},
    ]
    host, virtual = summarise({"n": 4, "rows": rows}).tables
    assert host.rows[0] == ["zbh1", "never", "nothing", "50 (99)", "40 (99)", "0.80", "-"]
    assert host.rows[1][3:] == ["150 (99)", "90 (99)", "0.60", "0.40"]
    assert virtual.rows == [["1F1B", 4, "10.0", "8.0", "25 %"]]
