"""Layers measured on the CPU: the memory at several sizes."""

import pytest
import torch
from torch import nn

from torchgpipe.planner import layers
from torchgpipe.planner.layers import measured
from torchgpipe.values.microbatch import scatter

CPU = torch.device("cpu")


def measure(module, *counts):
    batches = {64 // count: scatter(torch.rand(64, 4), count)[0] for count in counts}
    last = 64 // counts[-1]
    return measured(module, {last: batches[last]}, batches, CPU, timeout=0)


def test_memory_of_each_size():
    linear, tanh = measure(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 1, 2, 4)
    for rows in (64, 32, 16):
        size = rows * 4 * 4
        assert linear.memory.output.at(rows) == size
        # It keeps its input and its weights alone.
        assert linear.memory.inner.at(rows) == 0
        assert tanh.memory.forward.at(rows) == size
        # The gradient of the output, which is held, and that of the input.
        assert tanh.memory.backward.whole[0].held.at(rows) == 2 * size
    assert (linear.memory.saves_input, linear.memory.saves_output) == (True, False)
    assert (tanh.memory.saves_input, tanh.memory.saves_output) == (False, True)
    assert linear.memory.trainable == linear.memory.small == 4 * (16 + 4)


def test_sizes_that_are_too_large_are_left_out(monkeypatch):
    look = layers.look

    def small(sandbox):
        if len(next(iter(sandbox.batch))) > 16:
            raise torch.OutOfMemoryError("too large")
        return look(sandbox)

    monkeypatch.setattr(layers, "look", small)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in measure(module, 1, 2, 4, 8):
        assert [layer.memory.output.at(rows) for rows in (8, 16, 64)] == [128, 256, 1024]
    with pytest.raises(torch.OutOfMemoryError):
        measure(module, 1, 2)
