"""The summary of a device map's benchmark, with and without its parts."""

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.suites.mapped import summarise
from benchmarks.suites.tables.mapped import spread

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
    (chart,) = found.charts
    assert chart.labels == ["never", "always"]
    assert chart.series["device map"] == [1560, None]
    assert chart.series["GPipe"] == [671, 671]


def test_stages_alone_have_no_chart():
    assert not summary(STEPS[0]).charts


def test_both():
    host, steps, found = summary(*ROWS), summary(*STEPS), summary(*ROWS, *STEPS)
    assert found.title == host.title
    assert found.tables == [*host.tables, *steps.tables]
    assert found.charts == [*host.charts, *steps.charts]
    assert found.notes == f"{host.notes}\n\n{steps.notes}"


@pytest.mark.parametrize(
    ("times", "text"), [([], "-"), ([33.0, 33.0], "33"), ([940.5, 911.0, 912.0], "911 to 940")]
)
def test_spread(times, text):
    assert spread(times) == text


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["mapped", "--device", "cuda"])
    assert "there must be a GPU that CUDA knows (device: cuda)" in capsys.readouterr().err


def test_a_gpu_without_transformers(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.suites.mapped.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["mapped", "--device", "cuda"])
    assert "it needs pip install accelerate transformers" in capsys.readouterr().err
