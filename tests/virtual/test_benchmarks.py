"""Benchmarks run on virtual accelerators, in processes of their own."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks.models.experiments import Experiment, unet
from benchmarks.suites import bubbles, offload, one_gpu, speed
from benchmarks.suites.overhead import main
from benchmarks.suites.tables import virtual_speed
from examples import schedules
from tests.support.size import soak
from torchgpipe.engine import workers

pytestmark = pytest.mark.usefixtures("prompt")


@soak
def test_overhead(tmp_path):
    path = tmp_path / "overhead.json"
    size = ["--n", "2", "--m", "2", "--rounds", "1", "--seconds", "0.001"]
    main([*size, "--device", "virtual", "--rivals", "ours", "--output", str(path)])
    result = json.loads(path.read_text("utf-8"))
    assert result["machine"]["device"] == "virtual"
    assert not result["left_out"]
    assert [list(row["rivals"]) for row in result["rows"]] == [["ours"]] * 7


@soak
def test_host_bound(tmp_path):
    path = tmp_path / "host.json"
    few = ["--n", "2", "--m", "2", "--seconds", "0", "--steps", "1", "--devices", "virtual"]
    command.main(["host_bound", *few, "--models", "tiny layers", "--output", str(path)])
    result = json.loads(path.read_text("utf-8"))
    assert not result["left_out"]
    modes = [row["mode"] for row in result["rows"]]
    assert modes == ["inference", "never", "except_last", "always"]
    assert all(row["rivals"]["ours"]["pipeline"]["min"] > 0 for row in result["rows"])


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


def test_tables_of_virtual_speed():
    row = {"experiment": "unet/x", "n": 2, "m": 3, "mode": "never", "batch": 6, "plain_ms": 100.0}
    row |= {"limit_ms": 50.0, "free_limit_ms": 40.0, "published": None}
    ours = {"ms": [50.0] * 3, "free_ms": [40.0] * 3, "busy": [0.5] * 3}
    theirs = {"ms": [60.0, 60.0, 100.0], "free_ms": [40.0] * 3, "busy": [0.25] * 3}
    row["rivals"] = {"ours": ours, "0.0.7": theirs}
    result = {"rivals": {"ours": "", "0.0.7": "", "x": ""}, "rows": [row], "rounds": 3}
    summary = virtual_speed.summarise(result)
    cells = ["60.0", "120.0", "120.0", "100.0", None, "1.200", "2.00", "-"]
    assert summary.tables[0].rows[0][4:] == cells
    over = ["1.000 (1.000)", "1.000 (1.000)", "50.0%", "1.200 (2.000)", "1.000 (1.000)", "25.0%"]
    assert summary.more[0].rows[0][4:] == [*over, None, None, None]


def test_speed_of_nobody(capsys):
    with pytest.raises(SystemExit):
        command.main(["speed", "--device", "virtual", "--rivals", "accumulation"])
    assert "name ours or 0.0.7" in capsys.readouterr().err


def test_parts(tmp_path, monkeypatch):
    # On a busy machine cells seem to block, and the profiler does not see the workers' threads.
    monkeypatch.setattr(workers, "perf_counter", workers.thread_time)
    path = tmp_path / "parts.json"
    few = ["--n", "2", "--m", "2", "--steps", "3", "--modes", "never"]
    command.main(["parts", "--device", "virtual", *few, "--output", str(path)])
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    # Nothing comes from one device to another on the CPU.
    assert row["shares"]["autograd functions"] > 0
    assert "Virtual accelerators" in path.with_suffix(".md").read_text("utf-8")


@soak
def test_offload(devices, tmp_path, monkeypatch):
    monkeypatch.setattr(offload.testing, "load", lambda count: devices[:count])
    path = tmp_path / "offload.json"
    command.main(["offload", "--ratios", "1.5", "--schedules", "1f1b", "--output", str(path)])
    rows = {row["mode"]: row for row in json.loads(path.read_text("utf-8"))["rows"]}
    assert {*rows} == {*offload.MODES, offload.OWN}
    told = [row for row in rows.values() if "simulated" in row]
    assert len(told) == 4
    for row in told:
        assert row["time"] == pytest.approx(row["simulated"]["time"])
        assert row["host"] == row["simulated"]["host"]
    assert max(rows["offload"]["peaks"]) < max(rows["never"]["peaks"])


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


@pytest.mark.parametrize("device", ["virtual", "cpu"])
def test_instructions(device, tmp_path):
    path = tmp_path / "instructions.json"
    few = ["--n", "2", "--m", "2", "--modes", "always", "--seconds", "0", "--device", device]
    command.main(["instructions", *few, "--output", str(path)])
    for row in json.loads(path.read_text("utf-8"))["rows"]:
        assert row["instructions"] == {"fill_drain": 3, "1f1b": 3, "zbh1": 4}
        assert [*row["cells"]] == ["GPipe", *row["instructions"]]
        assert all(cell["min"] > 0 for cell in row["cells"].values())
    assert f"({device}, n=2)" in path.with_suffix(".md").read_text("utf-8")


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
