"""Exceptions of layers on virtual accelerators: beside other threads, and in backward's."""

import gc
import threading

import pytest
import torch
from torch import nn

from torchgpipe import GPipe

WIDTH = 4


class Slow(nn.Module):
    """A layer that runs until `end` is set, if it is slow."""

    def __init__(self):
        super().__init__()
        self.begun, self.end = threading.Event(), threading.Event()
        self.slow = False

    def forward(self, x):
        if self.slow:
            self.begun.set()
            assert self.end.wait(30)
        return x * 1


class FailBeside(nn.Module):
    """A layer that fails while another layer is slow."""

    def __init__(self, slow):
        super().__init__()
        self.other = [slow]
        self.fails = False

    def forward(self, x):
        if self.fails:
            assert self.other[0].begun.wait(30)
            raise ValueError("beside")
        return x * 1


def test_exception_does_not_wait_for_a_layer_that_is_slow(devices):
    """The next step waits, since no two threads compute one partition."""
    slow = Slow()
    beside = FailBeside(slow)
    model = GPipe(nn.Sequential(slow, beside), [1, 1], devices=[devices[0], "cpu"], chunks=2)
    x = torch.rand(2, WIDTH, device=devices[0])
    expected = model(x)

    class Second:
        """A hook that makes a layer slow for the second micro-batch."""

        count = 0

        def __call__(self, *_):
            self.count += 1
            slow.slow = self.count == 2

    handle = slow.register_forward_pre_hook(Second())
    beside.fails = True
    with pytest.raises(ValueError, match="beside"):
        model(x)
    assert not slow.end.is_set()
    handle.remove()
    slow.slow = beside.fails = False
    threading.Timer(0.1, slow.end.set).start()
    assert torch.equal(model(x), expected)
    assert slow.end.is_set()


class Fail(nn.Module):
    """A layer that raises, and keeps the exception."""

    def forward(self, x):
        self.error = ValueError("x")
        raise self.error


def test_a_graph_holds_no_other_partitions(devices):
    """A dropped graph is freed, even if another partition's layer keeps the exception."""
    gc.collect()
    before = torch.accelerator.memory_allocated(devices[0])
    layers = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), Fail())
    model = GPipe(layers, [1, 1], devices=devices[:2], chunks=2, checkpoint="always")
    with pytest.raises(ValueError, match="x"):
        model(torch.ones(4, 2, device=devices[0]))
    del model, layers
    gc.collect()
    assert torch.accelerator.memory_allocated(devices[0]) == before
