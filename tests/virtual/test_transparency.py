"""Each partition of a training has a virtual accelerator of its own, by default."""

import json
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.__main__ import main
from benchmarks.models import resnet
from benchmarks.models.images import Images
from benchmarks.suites import transparency


@pytest.fixture
def tiny(monkeypatch):
    """Random images, and a model of a block."""
    data = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
    monkeypatch.setattr(transparency, "digits", lambda size: Images("noise", 2, data, data))
    monkeypatch.setitem(transparency.MODELS, "resnet", partial(resnet, [1], width=4))


def test_transparency(devices, tiny, tmp_path, monkeypatch):
    balance_by_time, run = transparency.balance_by_time, transparency.Course.run
    timed, used = [], []

    def balance(*arguments, **options):
        timed.append(options["device"])
        return balance_by_time(*arguments, **options)

    def trained(course, variant, seed):
        used.append(getattr(course.wrapped(course.make(), variant), "devices", None))
        return run(course, variant, seed)

    monkeypatch.setattr(transparency, "balance_by_time", balance)
    monkeypatch.setattr(transparency.Course, "run", trained)
    monkeypatch.setattr("benchmarks.report.files.draw", lambda charts, path: None)
    path = tmp_path / "found.json"
    few = ["--n", "1", "8", "--batch", "4", "--chunks", "2", "--epochs", "1", "--seeds", "1"]
    assert main(["transparency", *few, "--output", str(path)]) == 0
    # On virtual accelerators, layers take no time.
    assert timed == [torch.device("cpu")] * 2
    assert used[:3] == [None, devices[:1], devices]
    result = json.loads(path.read_text("utf-8"))
    assert (result["device"], result["devices"]) == ("virtual", 8)
    _, first, last = [x for x in result["rows"] if x["part"] == "exact"]
    assert max(first["loss_difference"], last["loss_difference"]) < 1e-9
    assert first["digests"] == last["digests"]
    assert "virtual accelerator of its own" in path.with_suffix(".md").read_text("utf-8")
