"""The benchmark of a training step's memory, on virtual accelerators."""

import gc
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.models.experiments import MEMORY, Experiment, unet
from benchmarks.rivals.library import Library
from benchmarks.rivals.training import Training
from benchmarks.suites.memory import GRID, main
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("prompt")

MODEL = {"name": "known"}
SIZE, BATCH = 16, 8

#: Bytes of what a layer makes of the mini-batch.
ACTIVATION = 4 * BATCH * 3 * SIZE * SIZE

#: Bytes of the loss, which is a mean of squares, and of its backward: the gradient of each square,
#: the output to the first power, that twice, and the product.
LOSS = 4 * ACTIVATION + 2 * 4


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3, SIZE, SIZE))

    def forward(self, x):
        return x + self.bias


@pytest.fixture
def known(devices, monkeypatch):
    """A model that keeps an activation in each layer but the first, and has a small parameter."""

    def known():
        return nn.Sequential(Bias(), *[nn.Tanh() for _ in range(7)])

    monkeypatch.setattr("benchmarks.models.known", known, raising=False)
    # An exception and the frames of its traceback hold each other, and tensors of earlier tests.
    gc.collect()
    # Autograd's threads may hold what they computed last.
    return [torch.accelerator.memory_allocated(device) for device in devices]


def test_plain(devices, known):
    (found,) = Training(Library(GPipe, devices), MODEL, SIZE, BATCH).memory()
    size = ACTIVATION // BATCH
    assert found["parameters"] == found["gradients"] == size
    # The mini-batch, saved tensors of seven layers, and the loss's tensors for backward.
    assert found["peak"] - size - known[0] == (1 + 7) * ACTIVATION + LOSS


@pytest.mark.parametrize(("mode", "kept"), [("never", 4), ("always", 1)])
def test_partitions(mode, kept, devices, known):
    training = Training(Library(GPipe, devices), MODEL, SIZE, BATCH, [4, 4], 4, mode)
    first, last = training.memory()
    assert [first["parameters"], last["parameters"]] == [ACTIVATION // BATCH, 0]
    # Saved tensors of four layers, or only the input of these, and the output.
    assert last["peak"] - known[1] == (kept + 1) * ACTIVATION + LOSS
    # The mini-batch, and saved tensors of three layers, of one micro-batch or of all.
    least = ACTIVATION + 3 * (ACTIVATION if mode == "never" else ACTIVATION // 4)
    assert least < first["peak"] - known[0] < least + 2 * ACTIVATION


def test_main(tmp_path, capsys, monkeypatch):
    experiments = [
        Experiment("baseline", unet(1, 64), 192, 32),
        Experiment("pipeline-2", unet(1, 64), 192, 32, 2, 32),
    ]
    monkeypatch.setitem(MEMORY, "unet", experiments)
    small = {**GRID["gpt"].model, "vocabulary": 64, "layers": 6, "width": 16, "heads": 2}
    monkeypatch.setitem(GRID, "gpt", replace(GRID["gpt"], model=small, batch=8))
    path = tmp_path / "memory.json"
    tiny = ["--experiments", "unet", "--scale", "16", "64", "2", "--grid", "gpt"]
    tiny += ["--n", "2", "--m", "4", "--modes", "always"]
    main([*tiny, "--rivals", "ours", "plain", "--output", str(path)])
    result = json.loads(path.read_text("utf-8"))
    assert result["device"] == "virtual"
    assert not result["left_out"]
    rows = {(row["family"], row["name"]): row["rivals"] for row in result["rows"]}
    assert len(rows) == 2 + 2
    for (family, name), rivals in rows.items():
        for found in rivals.values():
            for device in found["devices"]:
                assert device["peak"] > device["parameters"] == device["gradients"]
        ours = {"baseline": 0, "plain": 0}.get(name, 1)
        assert list(rivals) == ["plain"] * (family == "experiments" or not ours) + ["ours"] * ours
    (plain,) = rows["grid", "plain"]["plain"]["devices"]
    wrapped = rows["grid", "always"]["ours"]["devices"]
    assert len(wrapped) == 2
    assert sum(x["parameters"] for x in wrapped) == plain["parameters"]
    assert sum(x["peak"] for x in wrapped) < plain["peak"] / 2
    printed = capsys.readouterr().out
    assert printed.strip() == path.with_suffix(".md").read_text("utf-8").strip()
    assert "virtual accelerators" in printed
