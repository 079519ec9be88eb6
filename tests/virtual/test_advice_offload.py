"""Advice on steps whose cells leave for the memory of the host."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.planning import links, random_layers
from torchgpipe import GPipe, ScheduledLoss, trace
from torchgpipe.testing import observe

ROWS, WIDTH, M = 512, 128, 8


def traced(devices, mode, name, host, balance=(2, 2)):
    x, y = torch.rand(ROWS, WIDTH, device=devices[0]), torch.rand(ROWS, WIDTH, device=devices[1])
    layers = random_layers(5, 4, WIDTH)
    model = GPipe(layers, balance, devices=devices[:2], chunks=M, checkpoint=mode)
    training = model if name is None else ScheduledLoss(model, F.mse_loss, name)
    for _ in range(2):
        with observe(bandwidth=links(range(8), host=host)), trace(training) as timeline:
            (F.mse_loss(model(x), y) if name is None else training(x, y)).backward()
    return timeline


@pytest.mark.parametrize("mode", ["offload", ["never", "offload"]], ids=str)
@pytest.mark.parametrize("name", [None, "fill_drain", "zero_bubble_h2"])
def test_a_replay_takes_the_time_of_the_step(devices, name, mode):
    timeline = traced(devices, mode, name, 5e4)
    step = timeline.advisor
    assert step.now == pytest.approx(step.makespan, rel=0.02)


def test_slow_links(devices):
    advice = traced(devices, "offload", None, 2e4).advice
    assert advice.change == {"checkpoint": "never"}
    assert advice.reason.startswith("copies of cells to the host, and back, take")
    assert "more activations are kept" in advice.caution
