"""The pictures at the end of the demo: three schedules of one model, side by side."""

import pytest

from examples import timelines


@pytest.fixture(autouse=True)
def loaded(devices, monkeypatch):
    monkeypatch.setattr(timelines, "load", lambda count: devices[:count])
    monkeypatch.setattr(timelines, "STEPS", 1)
    monkeypatch.setattr(timelines, "TOKENS", 32)


def test_main(tmp_path, capsys):
    assert timelines.main(["--chunks", "8", "--folder", str(tmp_path)]) == 0
    _, head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["schedule", "ms", "bubble", "MiB"]
    assert [row.split()[0] for row in rows] == ["GPipe", "1F1B", "ZB-V"]
    memory = [float(row.split()[-1]) for row in rows]
    # 1F1B keeps fewer micro-batches than GPipe.
    assert memory[1] < memory[0]
    text = (tmp_path / "schedules.svg").read_text("utf-8")
    assert last.endswith("schedules.svg")
    places = [text.index(f">{title}</text>") for title in timelines.SCHEDULES]
    assert places == sorted(places)
