"""Costs of layers are counted on the meta device, forward and backward apart."""

from math import inf

import pytest
from torch import nn

from benchmarks.models.skips import Stash
from benchmarks.simulate import costs
from torchgpipe.skip import Namespace, pop, skippable

#: An operation takes a millisecond, and memory no time; and the other way round.
ARITHMETIC = costs.Gpu("arithmetic", flops=1, memory=inf, link=1)
TRAFFIC = costs.Gpu("traffic", flops=inf, memory=1, link=1)

SIZE, BATCH = 4, 2
IMAGE = 4 * BATCH * SIZE * SIZE  # bytes of a channel


@skippable(pop=["skip"])
class Add(nn.Module):
    def forward(self, input):
        skip = yield pop("skip")
        return input + skip


@pytest.fixture
def count(monkeypatch):
    """Count the costs of layers, made by a function."""

    def count(*makers, gpu=ARITHMETIC):
        def known():
            return nn.Sequential(*[make() for make in makers])

        monkeypatch.setattr("benchmarks.models.known", known, raising=False)
        return costs.count({"name": "known"}, SIZE, BATCH, gpu)

    return count


def convolution(inputs, outputs):
    return lambda: nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


def linear(inputs, outputs):
    return lambda: nn.Linear(inputs, outputs)


def test_arithmetic(count):
    found = count(
        convolution(3, 8), convolution(8, 2), nn.Flatten, nn.Tanh, linear(2 * SIZE * SIZE, 5)
    )
    first = 2 * BATCH * SIZE * SIZE * 3 * 8 * 9
    second = 2 * BATCH * SIZE * SIZE * 8 * 2 * 9
    last = 2 * BATCH * 2 * SIZE * SIZE * 5
    assert found.forward == [first, second, 0, 0, last]
    # Nobody needs the gradient of data.
    assert found.backward == [first, 2 * second, 0, 0, 2 * last]


def test_traffic(count):
    found = count(convolution(3, 8), nn.Tanh, nn.Flatten, nn.Sigmoid, gpu=TRAFFIC)
    weight = 4 * 3 * 8 * 9
    # Read and written; in backward the gradient, too. Views cost nothing.
    assert found.forward == [11 * IMAGE + weight, 16 * IMAGE, 0, 16 * IMAGE]
    assert found.backward[1:] == [24 * IMAGE, 0, 24 * IMAGE]


def test_bytes(count):
    found = count(convolution(3, 8), nn.ReLU, lambda: nn.BatchNorm2d(8), nn.Tanh)
    assert found.parameters == [4 * 3 * 8 * 9, 0, 4 * (8 + 8), 0]
    assert found.outputs == [8 * IMAGE] * 4
    # The normalisation saves its input, which ReLU has saved, and mean and deviation of channels.
    assert found.saved == [3 * IMAGE, 8 * IMAGE, 4 * (8 + 8), 8 * IMAGE]


def test_skips(count):
    outer, inner = Namespace(), Namespace()

    def both():
        return nn.Sequential(Stash().isolate(inner), nn.Tanh(), Add().isolate(inner))

    found = count(
        convolution(3, 8), lambda: Stash().isolate(outer), both, lambda: Add().isolate(outer)
    )
    assert found.skips == [(1, 3, 8 * IMAGE)]


def test_balance():
    assert costs.balance([1, 1, 1, 1, 4], 2) == [4, 1]
    assert costs.balance([3.5, 1, 1, 1, 1], 3) == [1, 2, 2]
