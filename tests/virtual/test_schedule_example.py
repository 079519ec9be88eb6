"""The example of schedules prints what it measures beside what the simulator says."""

import pytest

from examples import schedules
from tests.support.size import some


@pytest.fixture(autouse=True)
def loaded(devices, monkeypatch):
    monkeypatch.setattr(schedules, "load", lambda count: devices[:count])


@pytest.mark.parametrize("mode", some(["never", "except_last"], ["never"]))
def test_main(mode, capsys):
    assert schedules.main(["--chunks", "4", "--checkpoint", mode]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["schedule", "ms", "bubble", "simulated", "MiB"]
    assert last == "All gradients are equal"
    assert [row.split()[0] for row in rows] == [*schedules.PLACES]
    for row in rows if mode == "never" else ():
        _, _, bubble, known, _ = row.split()
        assert bubble == known


def test_main_where_they_differ(monkeypatch, capsys):
    monkeypatch.setattr(schedules.torch, "allclose", lambda *args, **options: False)
    assert schedules.main(["--chunks", "1"]) == 1
    assert "Not as it should be" in capsys.readouterr().out
