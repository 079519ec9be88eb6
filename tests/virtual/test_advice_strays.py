"""Advice on layers that copy between devices by themselves."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import Timed
from tests.support.size import some
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, trace
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine import workers
from torchgpipe.testing import observe

ROWS = 16
#: Bytes per millisecond: the table takes a few hundredths of one.
SLOW = {(a, b): 400.0 for a in range(8) for b in range(8) if a != b}


class Reading(nn.Module):
    """Layer that adds a table, which may be on another device."""

    def __init__(self, layer, device):
        super().__init__()
        self.layer = layer
        # No wrapper knows of it, nor moves it.
        self.table = [torch.zeros(1, 4, device=device)]

    def forward(self, input):
        return self.layer(input + self.table[0].to(input.device))


@pytest.fixture(autouse=True)
def issued_by_the_caller(monkeypatch):
    """Have one thread issue all: what is between the times is another thread's otherwise."""
    monkeypatch.setattr(workers, "ASLEEP", math.inf)
    monkeypatch.setattr(workers, "has_streams", has_streams)


def traced(devices, schedule, reading, mode="never", host=0.0):
    """The timeline of a step whose layers read tables: by the layer, the index of the device."""
    layers = [Timed(nn.Tanh(), (0.5, 0.5, 0.5)) for _ in range(8)]
    for k, place in reading.items():
        layers[k] = Reading(layers[k], devices[place])
    model = GPipe(nn.Sequential(*layers), [2] * 4, devices=devices[:4], chunks=8, checkpoint=mode)
    training = model if schedule is None else ScheduledLoss(model, F.mse_loss, schedule)
    x, y = torch.rand(ROWS, 4, device=devices[0]), torch.rand(ROWS, 4, device=devices[3])
    for _ in range(2):
        with observe(bandwidth=SLOW, host=host), trace(training) as timeline:
            (F.mse_loss(training(x), y) if schedule is None else training(x, y)).backward()
    return timeline


CASES = [("1f1b", 6, 2), ("1f1b", 2, 0), ("1f1b", 7, 1), ("zbh1", 6, 2)]


@pytest.mark.parametrize("mode", some(["never", "always"], ["never"]))
@pytest.mark.parametrize(("schedule", "layer", "place"), some(CASES, CASES[:1]))
def test_a_stray_copy_is_named(devices, schedule, layer, place, mode):
    before = traced(devices, schedule, {layer: place}, mode)
    after = traced(devices, schedule, {layer: layer // 2}, mode)
    if after.makespan > 0.98 * before.makespan:
        return
    advice = before.advice
    own = devices[layer // 2]
    assert advice.reason.startswith(f"{own} and {devices[place]} wait up to ")
    assert ".to() in test_advice_strays.py, line 32" in advice.reason
    assert not advice.change
    assert advice.remedy == f"have what is read there on {own}"
    assert after.advice is None or "copies" not in after.advice.reason


def test_a_host_that_is_late(devices):
    """A copy is named by the devices of its tensors, however late the host is."""
    advice = traced(devices, "1f1b", {}, host=0.02).advice
    assert advice is None or "copies" not in advice.reason
    advice = traced(devices, "1f1b", {6: 2}, host=0.02).advice
    assert advice.reason.startswith("virtual:3 and virtual:2 wait")


class Asking(nn.Linear):
    """Layer that makes the host wait for its device."""

    def forward(self, input):
        output = super().forward(input)
        output.sum().item()
        return output


def test_threads_of_a_map_do_not_copy(devices):
    """Between the times of a layer, other threads issue work to other devices."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)], Asking(64, 64))
    places = {str(k): device for k, device in enumerate(devices[:4])}
    pipe = MappedGPipe(model, places, chunks=8, checkpoint="never", threads=4)
    x = torch.rand(64, 64)
    with observe(costs={"addmm": 1.0, "mm": 1.0}):
        for _ in range(3):
            with trace(pipe) as timeline:
                pipe(x).sum().backward()
            assert timeline.advice is None or "cop" not in timeline.advice.reason
