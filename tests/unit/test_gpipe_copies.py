"""The wrapper denies to be moved, and can be copied."""

import pytest
import torch
from torch import nn

from tests.support.helpers import linears
from torchgpipe import GPipe


@pytest.fixture
def model(device):
    return GPipe(linears(3, 4, 5, 2), [2, 1], devices=[device] * 2, chunks=2)


@pytest.fixture
def input(device):
    return torch.rand(5, 3, device=device)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.cuda(),
        lambda m: m.cuda(0),
        lambda m: m.cpu(),
        lambda m: m.to("cpu"),
        lambda m: m.to(0),
        lambda m: m.to(torch.device("meta")),
        lambda m: m.to(torch.empty(1)),
    ],
)
def test_moving_is_denied(move, model, device):
    with pytest.raises(TypeError, match="must stay on their devices"):
        move(model)
    for parameter in model.parameters():
        assert (parameter.device, parameter.dtype) == (device, torch.float32)


def test_every_device_is_asked():
    """A call that moves no tensor of one partition may move those of another."""
    model = GPipe(linears(1, 1, 1), [1, 1], devices=["meta", "cpu"])
    with pytest.raises(TypeError, match="must stay on their devices"):
        nn.Sequential(model).to("meta")
