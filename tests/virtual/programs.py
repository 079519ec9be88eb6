"""What tests of the virtual accelerators are made of."""

import torch

from torchgpipe.testing import Stream


def new_streams(device, count):
    return [torch.Stream(device=device) for _ in range(count)]


def one(device, size=4):
    """A tensor that everything is ordered after."""
    x = torch.ones(size, device=device)
    torch.accelerator.synchronize(device)
    return x


def read(x, name="read", cost=0.0):
    """Reads a tensor on the stream that is current, which takes a time."""
    torch.ops.virtual_accelerator.busy(x, cost, name)


def place(stream):
    return Stream(stream.device_index, stream.stream_id)
