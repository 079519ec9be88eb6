"""A stage is traced, or it is said why it cannot be."""

import random

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.graphs import Stage, traced
from torchgpipe.graphs.places import UntraceableError

ELSEWHERE = torch.ones(3, requires_grad=True)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.drop = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.register_buffer("mean", torch.zeros(3))
        self.count = 0
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def count(own, x):
    own.count += 1
    return own.layer(x)


def replace(own, x):
    own.mean = own.mean + x.mean(0)
    return own.layer(x)


def data(own, x):
    own.mean.data = own.mean + 1
    return own.layer(x)


def checkpointed(own, x):
    return torch.utils.checkpoint.checkpoint(own.drop, x, use_reentrant=False)


UNTRACEABLE = {
    "value": (lambda own, x: own.layer(x) if x.sum() > 1 else x, "depends on the values"),
    "shape": (lambda own, x: own.layer(x)[x.sum(1) > 1], "shapes"),
    "attribute": (count, r"attributes \(Layer\.count"),
    "buffer": (replace, "buffer"),
    "elsewhere": (lambda own, x: own.layer(x) * ELSEWHERE, "not among its parameters"),
    "python": (lambda own, x: own.layer(x) * random.random(), "Python"),
    "seed": (lambda own, x: own.layer(x) + len(str(torch.manual_seed(1))) * 0, "seeds"),
    "generator": (
        lambda own, x: own.layer(x) * torch.rand(3, generator=torch.Generator()),
        "generator of its own",
    ),
    "data": (data, "buffer"),
    "random backward": (checkpointed, "random"),
    "changed": (lambda own, x: own.layer(x) * own.mean.add_(1), "in place"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_reasons(name):
    function, reason = UNTRACEABLE[name]
    layer = Layer(function)
    before = {id(x) for x in [*layer.parameters(), *layer.buffers()]}
    with pytest.raises(UntraceableError, match=reason):
        traced(layer, torch.rand(2, 3, requires_grad=True))
    # Nothing of the attempt is left.
    assert {id(x) for x in [*layer.parameters(), *layer.buffers()]} == before
    assert layer.count == 0


def test_form():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            y = self.layer(x)
            return {"a": y, "b": (y, x.argmax(1)), "c": "text"}

    form = traced(Two(), torch.rand(2, 3)).form
    assert form.parts == {None: (0, 0, 1)}
    assert form.needs_grad == [True, False]
    assert form.structures[None].others == {3: "text"}
    assert form.fixed == (None, None)


def test_gradients_of_some_outputs():
    class Two(nn.Module):
        def forward(self, x):
            return x.sin(), x.sqrt()

    x = torch.zeros(2, requires_grad=True)
    stage = Stage(Two(), x)
    _, saved = stage.forward()
    (grad,), _ = stage.backward(saved, [torch.ones(2), None])
    # The derivative of the square root is infinite there.
    assert torch.equal(grad, torch.ones(2))


@pytest.mark.parametrize("enabled", [True, False])
def test_backward_is_without_autocast(enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        joint = traced(nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)).joint
    dtypes = {x.meta["val"].dtype for x in joint.backward if "mm" in str(x.target)}
    assert dtypes == {torch.bfloat16 if enabled else torch.float32}
