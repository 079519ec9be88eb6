"""Modules meet tensors of other devices that they are not called with, as of adapters outside."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import note_of
from tests.virtual.stages import Stage, limit, verify_steps
from tests.virtual.test_mapped import SEEDS
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss


class Scaled(Stage):
    """A stage that computes with the scale of a network outside, and with what it makes of it."""

    def __init__(self, network):
        super().__init__()
        # No child, since it is in a list.
        self.network = [network]

    def forward(self, x):
        (network,) = self.network
        return super().forward(x * network.scale) + (network.scale + 1) * x


class Network(nn.Module):
    """The stages of a model, and a scale that all of them read."""

    def __init__(self, n, scale):
        super().__init__()
        outside = nn.Module()
        outside.scale = scale
        self.layers = nn.Sequential(*[Scaled(outside) for _ in range(n)])
        self.outside = [outside]

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_of_one_element_comes_along(devices, mode, shape):
    n, m = 3, 4
    plain = Network(n, torch.full(shape, 0.7, requires_grad=True))
    x = torch.rand(8, 4)
    for row in x.split(2):
        plain(row).square().sum().backward()
    model = copy.deepcopy(plain)
    scale = model.outside[0].scale = torch.full(shape, 0.7, device=devices[0], requires_grad=True)
    names = {f"layers.{k}": devices[k] for k in range(n)}
    pipe = MappedGPipe(model, names, chunks=m, checkpoint=mode)
    verify_steps(pipe, plain, x, limit(mode, n, m), SEEDS[:2])
    scale.grad = None
    pipe(x.to(devices[0])).square().sum().backward()
    torch.testing.assert_close(scale.grad.cpu(), plain.outside[0].scale.grad)


class Shifted(nn.Linear):
    """A layer that reads a tensor of another device."""

    def __init__(self, shift, within):
        super().__init__(4, 4)
        self.outside, self.within = [nn.Module()], within
        self.outside[0].shift = shift

    def forward(self, x):
        shift = self.outside[0].shift
        if self.within:
            return checkpoint(lambda x: F.linear(x, self.weight) + shift, x, use_reentrant=False)
        return super().forward(x) + shift


WRAPS = {
    "GPipe": lambda layers, x, y: GPipe(layers, [1, 1], devices=[x, y]),
    "ScheduledLoss": lambda *given: ScheduledLoss(WRAPS["GPipe"](*given), torch.mean, "1f1b"),
    "MappedGPipe": lambda layers, x, y: MappedGPipe(layers, {"0": x, "1": y}),
    "outside of a step": lambda *given: WRAPS["MappedGPipe"](*given).module,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("within", [False, True])
def test_errors_name_the_layer_and_the_remedy(devices, wrap, within):
    first, second, *_ = devices
    # A checkpoint of PyTorch would compute again without what brings a tensor of one element.
    shift = torch.rand((1,) if within and "GPipe" in wrap else (4,), device=first)
    layers = nn.Sequential(nn.Linear(4, 4), Shifted(shift, within))
    with pytest.raises(RuntimeError, match="device") as caught:
        WRAPS[wrap](layers, first, second)(torch.rand(4, 4, device=first))
    note = note_of(caught.value)
    assert "(Shifted)" in note or "raised in 1 on virtual:1" in note
    assert "register it as a buffer" in note
