"""Deferred batch normalisation, which updates statistics when the forward is over."""

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races, wrap
from torchgpipe.testing import observe


def made(devices, mode):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in devices]
    return wrap(layers, devices, mode, 4, deferred_batch_norm=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [[0, 1], [0, 0], [0, 1, 0]], ids=str)
def test_statistics_can_be_read_after_a_forward(devices, place, mode):
    model = made([devices[d] for d in place], mode)
    x = torch.rand(16, 4, device=devices[0])
    with observe(jitter=0) as seen:
        output = model(x)
        read = [buffer + 0 for buffer in model.buffers()]
        output.sum().backward()
    assert_no_races(seen)
    assert len(read) == 3 * len(place)


@pytest.mark.parametrize("place", [[0, 1], [0, 0]], ids=str)
def test_a_forward_without_backward(devices, place):
    model = made([devices[d] for d in place], "never")
    with observe(jitter=0) as seen, torch.no_grad():
        model(torch.rand(16, 4, device=devices[0]))
    assert_no_races(seen)
