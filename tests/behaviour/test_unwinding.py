"""Ctrl-C may come anywhere: the caller's thread gets its settings back."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe import GPipe
from torchgpipe.ambient import context as thread
from torchgpipe.ambient.context import EnteredModes, Modes, Swap, autocast_nesting, current_hooks
from torchgpipe.ambient.random_numbers import CellNumbers, RestoredNumbers
from torchgpipe.devices.streams import current_streams, use_stream


@pytest.fixture
def places(device):
    """Devices of two partitions."""
    return [device] * 2


WIDTH = 4

#: Between what sets something and the block that it is set for; or after that, before it is unset.
WINDOWS = {
    "attributes of a thread": (Swap, "__enter__"),
    "attributes of a thread, afterwards": (Swap, "__exit__"),
    "hooks": (saved_tensors_hooks, "__enter__"),
    "hooks, afterwards": (saved_tensors_hooks, "__exit__"),
    "modes": (EnteredModes, "__enter__"),
    "modes, afterwards": (EnteredModes, "__exit__"),
    "a stream": (use_stream, "__enter__"),
    "a stream, afterwards": (use_stream, "__exit__"),
    "a micro-batch's numbers": (CellNumbers, "__enter__"),
    "a micro-batch's numbers, afterwards": (CellNumbers, "__exit__"),
    "recomputed numbers": (RestoredNumbers, "__enter__"),
    "recomputed numbers, afterwards": (RestoredNumbers, "__exit__"),
}


def made(places):
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh()) for _ in range(2)]
    return GPipe(nn.Sequential(*layers), [1, 1], devices=places, chunks=2, checkpoint="always")


def step(model):
    torch.manual_seed(0)
    x = torch.ones(4, WIDTH, device=model.devices[0])
    with torch.autocast(model.devices[-1].type, torch.bfloat16):
        output = model(x)
    output.float().sum().backward()
    grads = [parameter.grad.cpu() for parameter in model.parameters()]
    model.zero_grad()
    return grads


def state(model):
    """All that this thread has set."""
    streams = current_streams(model.devices)
    return (Modes.current(), autocast_nesting(), current_hooks(), thread.saved(), streams)


@pytest.mark.parametrize("window", WINDOWS)
def test_interrupted_where_something_was_set(places, window, monkeypatch):
    model = made(places)
    # Backward in this thread, which alone is interrupted.
    with torch.autograd.set_multithreading_enabled(False):
        model._stages.workers._way = lambda: "caller"
        expected, before = step(model), state(model)
        owner, name = WINDOWS[window]
        original = getattr(owner, name)
        for k in range(3):
            left = [k]

            def interrupted(*args, left=left):
                left[0] -= 1
                if left[0] >= 0:
                    return original(*args)
                if left[0] == -1:
                    if name == "__enter__":
                        original(*args)
                    raise KeyboardInterrupt
                return original(*args)

            monkeypatch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(model)
            monkeypatch.undo()
            assert state(model) == before
            model.zero_grad()
            assert all(map(torch.equal, step(model), expected))


class Left(nn.Module):
    """A layer that enters a mode, and fails before it leaves it."""

    def forward(self, x):
        torch.device("meta").__enter__()
        raise ArithmeticError


def test_a_layer_that_leaves_a_mode_entered(places):
    """The modes of the caller stay, and what the layer has entered goes."""
    model = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Left()), [1, 1], devices=places)
    with torch.device("cpu"):
        before = state(model)
        with pytest.raises(ArithmeticError):
            model(torch.ones(4, WIDTH, device=model.devices[0]))
        assert state(model) == before
        assert torch.ones(1).device.type == "cpu"
