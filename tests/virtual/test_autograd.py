"""Autograd's functions besides backward, on several devices: right values, and no races."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.support.helpers import MODES, wrap
from tests.virtual.models import LAYERS, WIDTH
from tests.virtual.training import loss_of, verify

M = 3


def made(place, devices, mode, names=("linear", "shifted", "tanh")):
    partitions = [[LAYERS[name]() for name in names] for _ in place]
    return wrap(partitions, [devices[d] for d in place], mode).double()


def batch():
    return torch.randn(2 * M, WIDTH).double()


def optimizer_in_backward(model, value):
    """Update each parameter as soon as its gradient is there, and free the gradient."""
    optimizers = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for _ in range(2):
        output = model(value)
        loss_of(output).backward()
    for handle in handles:
        handle.remove()
    return output


def called_functionally(model, value):
    """Call with other parameters, computed from leaves, on all devices."""
    torch.manual_seed(3)
    leaves = {
        name: torch.rand(p.shape).double().to(p.device).requires_grad_()
        for name, p in model.named_parameters()
    }
    output = functional_call(model, {name: x.tanh() for name, x in leaves.items()}, (value,))
    loss_of(output).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        parameter.grad = leaves[name].grad
    return output


class Tied(nn.Module):
    """A layer with the weight of another one."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x @ self.weight).sin()


@pytest.mark.parametrize(
    ("place", "mode"), [*zip([[0, 1, 0], [0, 0, 1, 0], [0, 0]], MODES)], ids=str
)
@pytest.mark.parametrize(
    "way",
    [optimizer_in_backward, called_functionally],
)
def test_tied_parameters(devices, way, place, mode):
    """The first and the last partition share a weight, on one device."""
    parts = [[LAYERS["linear"](), nn.Tanh()] for _ in place]
    parts[-1].append(Tied(parts[0][0].layer.weight))
    model = wrap(parts, [devices[d] for d in place], mode, M).double()
    assert model[-1].weight is model[0].layer.weight
    verify(model, batch(), seed=1, requires_grad=True, streams=True, way=way)


def test_output_is_no_view(devices):
    """The output can be detached in place, even with one micro-batch."""
    for chunks in (1, 2):
        for place in ([0, 1], [0, 0], [0]):
            model = made(place, devices, "never", ["linear"])
            model.chunks = chunks
            model(batch().to(devices[0])).detach_()
