"""Steps of programs for virtual accelerators."""

import torch

from torchgpipe.testing import Stream


def new_streams(device, count):
    return [torch.Stream(device=device) for _ in range(count)]


def one(device, size=4):
    """Make a tensor, and order all later work after it."""
    x = torch.ones(size, device=device)
    torch.accelerator.synchronize(device)
    return x


def read(x, name="read", cost=0.0):
    """Read a tensor on the current stream, which takes a given time."""
    torch.ops.virtual_accelerator.busy(x, cost, name)


def place(stream):
    return Stream(stream.device_index, stream.stream_id)
