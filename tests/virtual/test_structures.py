"""Values of any structure on several devices take the usual time, without races."""

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, wrap
from tests.virtual.stages import ONE_MODE, SEEDS, Stage, limit, makespans, own_streams
from torchgpipe import NoChunk


class DictStage(Stage):
    """A stage that passes on a dict, and uses each tensor of the dict."""

    def forward(self, value):
        x = super().forward(value["x"] + value["bias"] * value["scale"])
        x = x.masked_fill(value["ids"][:, None] < 0, 0)
        return {"ids": value["ids"], "n": value["n"] + 1, **value, "x": x}


class Called:
    """A model that calls the wrapper with more than a tensor."""

    def __init__(self, model, requires_grad):
        self.model, self.chunks, self.devices = model, model.chunks, model.devices
        device = model.devices[0]
        self.bias = torch.rand(4, device=device, requires_grad=requires_grad)
        self.scale = torch.rand((), device=device, requires_grad=requires_grad)

    def __call__(self, x):
        ids = torch.arange(len(x), device=x.device)
        value = {"ids": ids, "x": x, "bias": NoChunk(self.bias), "n": 1, "scale": self.scale}
        return self.model(value)["x"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dicts_take_no_more_time(devices, requires_grad, mode):
    n, m = 4, 8
    model = wrap([DictStage() for _ in range(n)], devices[:n], mode, m)
    for seed in SEEDS[requires_grad::2]:
        with own_streams(devices, wanted=seed % 2 == 1):
            found = makespans(Called(model, requires_grad), seed=seed, requires_grad=requires_grad)
        assert found == [limit(mode, n, m)] * 2, f"jitter {seed}"


class FrozenStage(nn.Module):
    """A stage that saves only its weight, so that it needs no recomputation."""

    def __init__(self):
        super().__init__()
        self.stage = Stage()
        self.stage.requires_grad_(False)

    def forward(self, value):
        return value | {"x": self.stage(value["x"])}


@pytest.mark.parametrize("mode", ONE_MODE)
def test_frozen_stages_before_what_is_trained_take_no_time_in_backward(devices, mode):
    model = wrap(
        [FrozenStage(), FrozenStage(), DictStage(), DictStage()], devices[:4], mode, chunks=8
    )
    called = Called(model, requires_grad=False)
    # The first step copies frozen parameters, to see whether layers change them.
    makespans(called, seed=0, steps=1)
    (found,) = makespans(called, seed=0, steps=1)
    assert found == limit(mode, 2, 8) + 2
