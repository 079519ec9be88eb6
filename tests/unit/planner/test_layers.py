"""Layers measured on the CPU: the memory at several sizes."""

from random import Random

import pytest
import torch
from torch import nn

from torchgpipe.planner import layers
from torchgpipe.planner.layers import Chain, measured
from torchgpipe.values.microbatch import scatter

CPU = torch.device("cpu")


def measure(module, *counts):
    batches = {64 // count: scatter(torch.rand(64, 4), count)[0] for count in counts}
    last = 64 // counts[-1]
    return measured(module, {last: batches[last]}, batches, CPU, timeout=0)


def test_memory_of_each_size():
    (linear, tanh), sizes = measure(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 1, 2, 4)
    assert linear.weights.all == linear.weights.trainable == linear.weights.small == 4 * (16 + 4)
    assert tanh.weights.all == 0
    for rows in (64, 32, 16):
        first, last = sizes.at(rows).sections
        size = rows * 4 * 4
        # It keeps its input and its weights alone.
        assert first.kept == 0
        # A number stands after the outputs, for backward to begin with.
        assert last.forward == size + 4
        # The gradient of the output, which is held, and that of the input.
        assert last.held.first == 2 * size + 4
        values = sizes.at(rows).values
        assert [x.size for x in values][1:] == [size] * 2
        assert [x.savers for x in values] == [{0}, set(), {1}]


def test_layers_that_are_alike_have_one_time(monkeypatch):
    draw = Random(0)
    monkeypatch.setattr(
        layers, "_sample", lambda _: tuple([draw.uniform(1, 1.2) for _ in range(4)])
    )
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Linear(4, 8), nn.Linear(8, 4))
    found, _ = measure(module, 1, 2)
    times = [(x.forward, x.input, x.weight, x.again) for x in found]
    assert len({*times[:4]}) == 1
    assert len({*times[3:]}) == 3


def test_sizes_that_are_too_large_are_left_out(monkeypatch):
    class Small(Chain):
        def add(self, sandbox):
            if len(next(iter(sandbox.batch))) > 16:
                raise torch.OutOfMemoryError("too large")
            super().add(sandbox)

    monkeypatch.setattr(layers, "Chain", Small)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _, sizes = measure(module, 1, 2, 4, 8)
    for rows in (8, 16, 64):
        assert [x.size for x in sizes.at(rows).values][1:] == [16 * rows] * 2
    with pytest.raises(torch.OutOfMemoryError):
        measure(module, 1, 2)
