"""The example of device maps takes the time of layers that were put in sequence by hand."""

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from examples import device_map
from tests.support.size import some


@pytest.mark.parametrize("mode", some(["never", "except_last"], ["never"]))
def test_main(devices, monkeypatch, capsys, mode):
    monkeypatch.setattr(device_map, "load", lambda count: devices[:count])
    monkeypatch.setattr(device_map, "ROWS", 8)
    assert device_map.main(["--chunks", "8", "--checkpoint", mode]) == 0
    _, *rows, last = capsys.readouterr().out.splitlines()
    assert last == "All gradients are equal"
    plain, loop, mapped, by_hand = (float(row.split()[-2]) for row in rows)
    assert mapped <= 1.03 * by_hand
    assert by_hand < loop < plain


def test_main_where_they_differ(devices, monkeypatch, capsys):
    monkeypatch.setattr(device_map, "load", lambda count: devices[:count])
    monkeypatch.setattr(device_map, "ROWS", 8)
    monkeypatch.setattr(device_map.torch, "allclose", lambda *args, **options: False)
    assert device_map.main(["--chunks", "2"]) == 1
    assert "Not as it should be" in capsys.readouterr().out
