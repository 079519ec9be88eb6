"""Benchmarks run on virtual accelerators, in processes of their own."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks.models.experiments import Experiment, unet
from benchmarks.suites import bubbles, one_gpu, speed
from examples import schedules
from tests.support.size import soak

pytestmark = pytest.mark.usefixtures("prompt")


#: By the name of a benchmark: the options of its least size. They run in a soak alone.
LEAST = {
    "offload": ["--ratios", "1.5", "--schedules", "1f1b"],
    "overhead": ["--n", "2", "--m", "2", "--rounds", "1", "--seconds", "0", "--rivals", "ours"],
    "host_bound": ["--n", "2", "--m", "2", "--seconds", "0", "--steps", "1", "--models"],
}
LEAST["overhead"] += ["--device", "virtual"]
LEAST["host_bound"] += ["tiny layers", "--devices", "virtual"]


@soak
@pytest.mark.parametrize("name", LEAST)
def test_least_size(name, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(bubbles.testing, "load", lambda count=8: devices[:count])
    path = tmp_path / f"{name}.json"
    assert not command.main([name, *LEAST[name], "--output", str(path)])
    result = json.loads(path.read_text("utf-8"))
    assert result["rows"]
    assert not result.get("left_out")
    assert path.with_suffix(".md").read_text("utf-8")


def test_one_gpu(tmp_path):
    path = tmp_path / "one.json"
    one_gpu.main(["--device", "virtual", "--repeat", "1", "--output", str(path)])
    ratios = [row["ratio"] for row in json.loads(path.read_text("utf-8"))["rows"]]
    assert ratios == pytest.approx([1, 1, 1])
    assert "**virtual**" in path.with_suffix(".md").read_text("utf-8")


def test_speed(tmp_path, monkeypatch):
    small = Experiment("pipeline-2", unet(1, 16), 64, 32, 2, 8, published=35.502)
    monkeypatch.setattr(speed, "SPEED", {"unet": [small]})
    path = tmp_path / "speed.json"
    few = ["--experiments", "unet/pipeline-2", "--modes", "paper", "--rounds", "2"]
    command.main(["speed", "--device", "virtual", *few, "--rivals", "ours", "--output", str(path)])
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["rivals"]["ours"]["ms"] == pytest.approx([row["limit_ms"]] * 2)
    assert row["rivals"]["ours"]["free_ms"] == pytest.approx([row["free_limit_ms"]] * 2)
    assert row["free_limit_ms"] < row["limit_ms"] < row["plain_ms"]
    assert row["published"] == 35.502
    assert "**Virtual time**" in path.with_suffix(".md").read_text("utf-8")


@soak
def test_bubbles(devices, tmp_path, monkeypatch):
    for place in (schedules, bubbles.testing):
        monkeypatch.setattr(place, "load", lambda count: devices[:count])
    path = tmp_path / "bubbles.json"
    command.main(["bubbles", "--m", "8", "--output", str(path)])
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert {row["schedule"] for row in rows} == {*schedules.PLACES}
    for row in rows:
        assert row["bubble"] == pytest.approx(row["simulated"])
        assert row["bubble"] == pytest.approx(row["published"])
    # A plain step of the eight blocks' products takes 768 ms, and four devices share it.
    ideal = 3 * 8 * schedules.BLOCKS * 4 / schedules.WORKERS
    assert all(row["ms"] * (1 - row["bubble"]) <= ideal for row in rows)


@soak
def test_mapped(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples import device_map

    monkeypatch.setattr(device_map, "ROWS", 8)
    monkeypatch.setattr(device_map, "BLOCKS", 4)
    monkeypatch.setattr("benchmarks.simulate.mapped.MODES", ["never"])
    path = tmp_path / "mapped.json"
    few = ["--blocks", "4", "--m", "2", "--seconds", "0", "--device", "virtual", "--repeat", "1"]
    command.main(["mapped", *few, "--output", str(path)])
    result = json.loads(path.read_text("utf-8"))
    assert "left_out" not in result
    *rows, _, steps = result["rows"]
    assert [row["kind"] for row in rows] == ["inference", "training"]
    for row in rows:
        assert [*row["modules"]] == ["plain", "Accelerate", "MappedGPipe"]
        assert all(found["min"] > 0 for found in row["modules"].values())
    text = path.with_suffix(".md").read_text("utf-8")
    assert "(virtual, 4 devices)" in text
    assert "**Virtual time**" in text
    plain, loop, (mapped,), by_hand = steps["ms"].values()
    assert [mapped] == by_hand < loop < plain


def test_mapped_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.mapped.find_spec", lambda name: None)
    path = tmp_path / "mapped.json"
    command.main(["mapped", "--repeat", "2", "--output", str(path)])
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert {row["mode"]: row["limit"] for row in rows} == {
        "never": 33,
        "except_last": 40,
        "always": 41,
    }
    for row in rows:
        assert row["ms"] == dict.fromkeys(["MappedGPipe", "GPipe"], [row["limit"]] * 2)
    text = path.with_suffix(".md").read_text("utf-8")
    assert "Not run: the Llama: it needs pip install accelerate transformers" in text
