"""Tensors of a cell that leave for the host, and those that stay: small, gone, or not there yet."""

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races, wrap
from tests.support.offload import WIDTH
from torchgpipe.devices.streams import current_stream
from torchgpipe.recompute.storage import Storage
from torchgpipe.testing import observe

M = 5


class Squares(nn.Module):
    """A layer that saves a tensor of its own."""

    def forward(self, x):
        y = x * 2
        return y * y


class AndSmall(nn.Module):
    """A layer that saves a small view of that, too."""

    def forward(self, x):
        y = x * 2
        return y * y + (y[0, :4] * y[0, :4]).sum()


class AndTrials(nn.Module):
    """A layer that computes more, under grad, and uses none of it."""

    def forward(self, x):
        for _ in range(8):
            x.sin().cos().sin()
        y = x * 2
        return y * y


class Beside(nn.Module):
    """A layer that computes a term of the loss on a stream of its own, which nobody waits for."""

    def __init__(self):
        super().__init__()
        self.terms, self.streams = [], []

    def forward(self, x):
        side = torch.Stream(x.device)
        side.wait_stream(current_stream(x.device))
        with side:
            y = x * 2
            self.terms.append((y * y).sum())
        x.record_stream(side)
        self.streams.append(side)
        return x * 1


def step(devices, make, mode):
    """The gradients of a step, and what was observed in it."""
    torch.manual_seed(0)
    layer = make()
    model = wrap([nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)], devices[:1], mode, M)
    with observe(jitter=0) as seen:
        loss = model(torch.rand(4 * M, WIDTH, device=devices[0])).sum()
        if isinstance(layer, Beside):
            for stream in layer.streams:
                current_stream(devices[0]).wait_stream(stream)
            loss = loss + sum(layer.terms)
        loss.backward()
    assert_no_races(seen)
    return [x.grad.cpu() for x in model.parameters()], seen


@pytest.mark.parametrize("make", [AndSmall, AndTrials])
def test_as_much_leaves_as_without(devices, make):
    """A small view does not hold its storage, nor does a graph that is gone."""
    expected, _ = step(devices, make, "never")
    found, seen = step(devices, make, "offload")
    assert all(map(torch.equal, found, expected))
    _, other = step(devices, Squares, "offload")
    assert seen.transfers[0, "cpu"].bytes == other.transfers[0, "cpu"].bytes > 0


def test_what_a_stream_has_not_computed_yet_stays(devices):
    expected, _ = step(devices, Beside, "never")
    found, _ = step(devices, Beside, "offload")
    assert all(map(torch.equal, found, expected))


def test_new_memory_that_is_filled(devices, monkeypatch):
    """Deterministic mode fills new memory of CUDA, on the stream that takes it."""
    make_room = Storage.make_room

    def filling(self, device):
        make_room(self, device)
        self.here.fill_(255)

    monkeypatch.setattr(Storage, "make_room", filling)
    expected, _ = step(devices, Squares, "never")
    found, _ = step(devices, Squares, "offload")
    assert all(map(torch.equal, found, expected))


class Derivatives(nn.Module):
    """A layer that computes with derivatives of functions of its own."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def forward(self, x):
        return self.take(lambda y: (y * y).sin() * y)(x)


def test_transforms_that_take_no_hooks(devices):
    def gradients(function):
        return torch.func.grad(lambda x: function(x).sum())

    step(devices, lambda: Derivatives(gradients), "never")
    with pytest.raises(RuntimeError, match=r"take no hooks .*use checkpoint='never'"):
        step(devices, lambda: Derivatives(gradients), "offload")
