"""Garbage: steps on accelerators leave nothing to Python's collector either."""

import pytest
import torch
from torch import nn

from tests.contract.memory import uncollected
from torchgpipe import MappedGPipe


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_a_step_on_accelerators_leaves_nothing_to_the_collector(mode, threads, devices):
    """Glue between modules and later visits of a device are let go of."""

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
    x = torch.rand(4, 4, device=devices[0])
    for _ in range(2):
        mapped(x, torch.ones(4, 4))["z"].sum().backward()
    with uncollected() as collect:
        mapped(x, torch.ones(4, 4))["z"].sum().backward()
        assert collect() == 0
