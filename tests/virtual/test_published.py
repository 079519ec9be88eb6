"""Published tables, which the benchmarks make anew on virtual accelerators."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.suites import controllable_memory, dualpipe, zero_bubble


@pytest.fixture
def publish(devices, tmp_path, monkeypatch):
    def publish(suite, *options):
        monkeypatch.setattr(suite, "load", lambda count: devices[:count])
        name = suite.__name__.rpartition(".")[2]
        path = tmp_path / f"{name}.json"
        assert main([name, *options, "--output", str(path)]) == 0
        return json.loads(path.read_text("utf-8"))["rows"]

    return publish


def test_zero_bubble(publish, capsys, monkeypatch):
    monkeypatch.setattr(zero_bubble, "SCHEDULES", {"ZB-H2": "zero_bubble_h2"})
    monkeypatch.setattr(
        zero_bubble, "PUBLISHED", [(8, 24, (29.718, 29.444, 19.927), 0.527, (0.0698,))]
    )
    (row,) = publish(zero_bubble)
    assert row["rates"]["ZB-H2"] == [0.0698, 0.0698, 0.1003]
    assert "1 of 1 rates are equal" in capsys.readouterr().out


def test_controllable_memory(publish):
    rows = {row["schedule"]: row for row in publish(controllable_memory, "--n", "4")}
    kept = {name: row["kept"] for name, row in rows.items()}
    assert kept == {"1F1B": 4, "ZB1P": 4, "ZB2P": 7, "ZBV": 4, "V-Half": 3, "V-Min": 2}
    idle = {name: row["longest"] - 3 * row["m"] for name, row in rows.items()}
    assert idle == {"1F1B": 9, "ZB1P": 3, "ZB2P": 0, "ZBV": 0, "V-Half": 5, "V-Min": 5.5}
    # Over the whole step, workers of the last two that begin late have waited.
    assert [rows[name]["step"] - rows[name]["longest"] for name in ("ZB2P", "ZBV")] == [3, 1.5]


def test_dualpipe(publish):
    rows = publish(dualpipe, "--pp", "4")
    assert [row["devices"] for row in rows] == [4, 4, 2]
    for row in rows:
        for published, ours in (row["idle"], row["kept"]):
            assert ours == pytest.approx(published)
