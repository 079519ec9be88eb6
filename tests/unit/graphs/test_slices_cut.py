"""The backward of a stage is cut in two halves."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.graphs import Stage

STAGES = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (4, 8)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (2, 2, 9, 9),
    ),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
}


def operations(stage, function, *args):
    with FlopCounterMode(display=False) as counted:
        function(*args)
    return counted.get_total_flops()


@pytest.mark.parametrize("name", STAGES)
def test_arithmetic_is_split(name):
    """Count the arithmetic: I and W do that of B, and neither does all of it."""
    layers, shape = STAGES[name]()
    stage = Stage(layers, torch.rand(shape, requires_grad=True))
    outputs, saved = stage.forward()
    grads = [torch.rand_like(x) for x in outputs]
    whole = operations(stage, stage.backward, saved, grads)
    both = operations(stage, stage.halves, saved, grads)
    given = {"saved": saved, "tangent": grads}
    early = operations(stage, lambda: stage.call(stage.parts.input, **given))
    assert both <= 1.01 * whole
    assert 0.2 * whole < early < 0.8 * whole


class Shared(torch.autograd.Function):
    """A function that computes both gradients in the same memory."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        memory = grad * 2
        first = memory * 1
        memory.add_(1)
        return memory, first.sum(0)


def test_changes_in_place_are_in_one_half():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x):
            return Shared.apply(x, self.weight)

    stage = Stage(Layer(), torch.rand(2, 3, requires_grad=True))
    _, saved = stage.forward()
    grad = torch.rand(2, 3)
    (of_input,), (of_weight,) = stage.halves(saved, [grad])
    torch.testing.assert_close(of_input, grad * 2 + 1)
    torch.testing.assert_close(of_weight, (grad * 2).sum(0))
    assert stage.parts.weight.slice.nodes == []
