"""Garbage: steps on accelerators leave nothing to Python's collector either."""

import gc

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, MappedGPipe, ScheduledLoss


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_a_step_on_accelerators_leaves_nothing_to_the_collector(mode, threads, devices):
    """Fences, lanes, glue between modules and later visits of a device are let go of."""

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, scale):
            y = self.a(x)
            z = self.c(self.b(y).to(y.device) + y)
            return {"z": z * scale.to(z.device)}

    places = {"a": devices[0], "b": devices[1], "c": devices[0]}
    mapped = MappedGPipe(Returning(), places, chunks=2, checkpoint=mode, threads=threads)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = GPipe(layers, [1, 1], devices=devices[:2], chunks=2, checkpoint=mode)
    loss = ScheduledLoss(model, nn.functional.mse_loss)
    x, target = torch.rand(4, 4, device=devices[0]), torch.rand(4, 4, device=devices[1])
    steps = [lambda: mapped(x, torch.ones(4, 4))["z"].sum(), lambda: model(x).sum()]
    steps.append(lambda: loss(x, target))
    for step in steps:
        for _ in range(2):
            step().backward()
    gc.collect()
    gc.disable()
    try:
        for step in steps:
            step().backward()
            assert gc.collect() == 0
    finally:
        gc.enable()
