"""A model that carries skips through its partitions computes what it did without."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from benchmarks.models.skips import Stash
from benchmarks.rivals.carried import carried
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable


@skippable(pop=["skip"])
class Multiply(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, input):
        skip = yield pop("skip")
        return input * self.linear(skip)


class Two(nn.Module):
    def forward(self, input):
        return input.sin(), input.cos()


class Join(nn.Module):
    def forward(self, both):
        return both[0] + both[1].exp()


def model():
    """Three skips that cross, a tuple between layers, and a stash right before a cut."""
    a, b, c = Namespace(), Namespace(), Namespace()
    return nn.Sequential(
        nn.Linear(3, 3),
        Stash().isolate(a),
        nn.Tanh(),
        Stash().isolate(b),
        nn.Sequential(nn.Linear(3, 3), Multiply().isolate(a)),
        Stash().isolate(c),
        Two(),
        Join(),
        Multiply().isolate(c),
        Multiply().isolate(b),
    )


def outcome(model, input):
    output = model(input)
    output.square().mean().backward()
    return [output, *[x.grad for x in model.parameters()]]


@pytest.mark.parametrize("balance", [[10], [4, 6], [2, 2, 1, 2, 3], [1] * 10])
def test_same_as_plain(balance):
    plain = model()
    layers = deepcopy(plain)
    input = torch.randn(4, 3)
    expected = outcome(plain, input)
    found = outcome(carried(layers, balance), input)
    assert all(map(torch.equal, found, expected))
    for x in layers.parameters():
        x.grad = None
    sizes, devices = [1] * len(balance), [torch.device("cpu")] * len(balance)
    for mode in ("never", "always"):
        again = carried(deepcopy(plain), balance)
        pipeline = GPipe(again, sizes, devices=devices, chunks=2, checkpoint=mode)
        for x in pipeline.parameters():
            x.grad = None
        assert all(map(torch.allclose, outcome(pipeline, input), expected))
        # There are no portals, so that nothing but neighbours exchanges anything.
        assert not any(type(x).__dict__.get("skips_declared") for x in pipeline.modules())


def test_one_tensor_in_a_tuple():
    class Single(nn.Module):
        def forward(self, input):
            return (input,)

    partitions = carried(nn.Sequential(Single(), nn.Identity()), [1, 1])
    with pytest.raises(TypeError, match="must not be in a tuple of its own"):
        partitions(torch.rand(1))
