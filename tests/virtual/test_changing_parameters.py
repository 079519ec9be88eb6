"""Parameters that layers change through `.data`, on accelerators: seen where code names it."""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races
from torchgpipe import GPipe
from torchgpipe.recompute import buffers
from torchgpipe.testing import observe


class Plain(nn.Module):
    """A layer with a weight that something changes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.scale.clone()).tanh()


class Helped(Plain):
    """A layer that has a function change its weight."""

    def forward(self, x):
        self.renew()
        return super().forward(x)

    @torch.no_grad()
    def renew(self):
        renew(self)


class Around(nn.Module):
    """A layer that changes the weight of a layer within, in code within its code."""

    def __init__(self):
        super().__init__()
        self.layer = Plain()

    def forward(self, x):
        for scale in (layer.scale for layer in [self.layer]):
            (lambda: scale.data.mul_(0.9))()
        return self.layer(x)


def renew(layer, *_):
    layer.scale.data.mul_(0.9)


def hooked():
    layer = Plain()
    layer.register_forward_pre_hook(renew)
    return layer


class Directly(Plain):
    """A layer that changes its weight where it computes."""

    def forward(self, x):
        self.scale.data.mul_(0.9)
        return super().forward(x)


LAYERS = {"directly": Directly, "helped": Helped, "around": Around, "hook": hooked}


def trained(layers, devices, mode):
    """The gradients of two steps."""
    layers = copy.deepcopy(layers)
    model = GPipe(layers, [1, 2], devices=devices[:2], chunks=3, checkpoint=mode)
    found = []
    with observe() as seen:
        for _ in range(2):
            model.zero_grad()
            model(torch.linspace(-1, 1, 24, device=devices[0]).view(6, 4)).sum().backward()
            found += [p.grad.cpu() for p in model.parameters()]
    assert_no_races(seen)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(devices, name):
    layers = nn.Sequential(nn.Linear(4, 4), LAYERS[name](), nn.Linear(4, 4))
    expected = trained(layers, devices, "never")
    for mode in ("except_last", "always"):
        torch.testing.assert_close(trained(layers, devices, mode), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_large_ones_are_an_error(devices, name, monkeypatch):
    monkeypatch.setattr(buffers, "SMALL", 0)
    layers = nn.Sequential(nn.Linear(4, 4), LAYERS[name](), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"large .*parameter: scale"):
        trained(layers, devices, "always")
