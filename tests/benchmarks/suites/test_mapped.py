"""The summary of a device map's benchmark, with and without its parts."""

from benchmarks.suites.mapped import summarise

ROWS = [{"blocks": 8, "kind": kind, "m": 8, "modules": {}} for kind in ("inference", "training")]
for row in ROWS:
    for way, least in [("plain", 50.0), ("Accelerate", 90.0), ("MappedGPipe", 130.0)]:
        row["modules"][way] = {"min": least, "median": 2 * least}

BOTH = {"MappedGPipe": [552.0, 552.0], "GPipe": [671.0, 687.0]}
STEPS = [
    {"model": "equal stages", "mode": "never", "ms": BOTH, "limit": 33.0},
    {"model": "Llama", "mode": "never", "ms": {**BOTH, "device map": [1560.0]}, "limit": None},
    {"model": "Llama", "mode": "always", "ms": BOTH, "limit": None},
]


def summary(*rows):
    return summarise({"device": "virtual", "rows": [*rows]})


def test_host_costs_alone():
    found = summary(*ROWS)
    assert found.tables[0].rows[1] == [
        *(2, "training", 8, "50 (100)"),
        *("40 (80)", "80 (160)", "2.00 (2.00)"),
    ]
    assert "Virtual time" not in found.notes


def test_steps_alone():
    found = summary(*STEPS)
    (table,) = found.tables
    assert table.rows == [
        ["equal stages", "never", "-", "-", "552", "671 to 687", "33"],
        ["Llama", "never", "1560", "-", "552", "671 to 687", "-"],
        ["Llama", "always", "-", "-", "552", "671 to 687", "-"],
    ]
