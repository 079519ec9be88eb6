"""The examples of virtual accelerators print what they measure, and end with it."""

import pytest
import torch

from examples import mixture_of_experts, pictures, schedules
from tests.support.size import some
from torchgpipe.testing import UnavailableError


@pytest.fixture(autouse=True)
def loaded(devices, monkeypatch):
    for module in (mixture_of_experts, pictures, schedules):
        monkeypatch.setattr(module, "load", lambda count: devices[:count])
    # The whole examples take half a minute.
    monkeypatch.setattr(schedules, "WIDTH", 8)
    monkeypatch.setattr(schedules, "TOKENS", 8)
    monkeypatch.setattr(mixture_of_experts, "WORKERS", 1)


@pytest.mark.parametrize("mode", some(["never", "except_last"], ["never"]))
def test_device_map(devices, monkeypatch, capsys, mode):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from examples import device_map

    monkeypatch.setattr(device_map, "load", lambda count: devices[:count])
    monkeypatch.setattr(device_map, "ROWS", 8)
    monkeypatch.setattr(device_map, "BLOCKS", 4)
    assert device_map.main(["--chunks", "8", "--checkpoint", mode]) == 0
    _, *rows, last = capsys.readouterr().out.splitlines()
    assert last == "All gradients are equal"
    plain, loop, mapped, by_hand = (float(row.split()[-2]) for row in rows)
    assert mapped <= 1.03 * by_hand
    assert by_hand < loop < plain


def test_diffusion_lora(devices, monkeypatch):
    """Each pair is on the device of its layer."""
    pytest.importorskip("safetensors")
    from examples import diffusion_lora

    monkeypatch.setattr(diffusion_lora, "places", lambda count: devices[:count])
    for name, value in {"BLOCKS": 2, "PARTITIONS": 2, "WIDTH": 8, "ROWS": 8}.items():
        monkeypatch.setattr(diffusion_lora, name, value)
    assert diffusion_lora.main(["--steps", "2", "--rank", "1", "--chunks", "2"]) == 0


def test_mixture_of_experts(capsys):
    assert mixture_of_experts.main(["--chunks", "2"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["schedule", "ms", "exchanges"]
    assert last == "All gradients are equal"
    names = [row[:16].strip() for row in rows]
    assert names == ["1f1b", "zero_bubble_v", "dualpipe_v", "1f1b of pairs"]
    assert all(float(row[16:24]) > float(row[24:]) > 0 for row in rows)


@pytest.mark.parametrize("mode", some(["never", "except_last"], ["never"]))
def test_schedules(mode, capsys):
    assert schedules.main(["--chunks", "4", "--checkpoint", mode]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["schedule", "ms", "bubble", "simulated", "MiB"]
    assert last == "All gradients are equal"
    assert [row.split()[0] for row in rows] == [*schedules.PLACES]
    for row in rows if mode == "never" else ():
        _, _, bubble, known, _ = row.split()
        assert bubble == known


def test_pictures(capsys, tmp_path):
    assert pictures.main(["--folder", str(tmp_path), "--chunks", "8"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    ms, bubble, mib = zip(*[row[1:] for row in rows if row and row[0] in pictures.SCHEDULES])
    # One table of costs: the first two differ in memory only, whatever else the machine does.
    assert ms == ("264", "264", "204")
    assert bubble == ("27.3%", "27.3%", "5.9%")
    assert float(mib[1]) < float(mib[0])
    assert "F0 F1 F2 F3 .................B0--- F4" in text
    drawn = (tmp_path / "schedules.svg").read_text()
    places = [drawn.index(f">{title}</text>") for title in pictures.SCHEDULES]
    assert places == sorted(places)


def test_pictures_without_a_compiler(monkeypatch, capsys, tmp_path):
    def load(count):
        raise UnavailableError("there is no compiler")

    monkeypatch.setattr(pictures, "load", load)
    monkeypatch.setattr(pictures, "places", lambda count: [torch.device("cpu")] * count)
    assert pictures.main(["--folder", str(tmp_path), "--chunks", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step of ")
    assert "cpu (3)" in text
    assert text.rstrip().endswith("there is no compiler")
    assert [x.name for x in tmp_path.iterdir()] == ["schedules.svg"]
