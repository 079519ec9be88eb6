"""Training steps that are compared between a wrapped model and the plain one."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

BF16, FP16 = torch.bfloat16, torch.float16


def cross_entropy(model, batch):
    """The loss of a batch of inputs and classes."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def within_backward(model, batches, optimizer=SGD, **options):
    """Losses of steps in whose backward each parameter steps as soon as its gradient is there."""
    optimizers = {p: optimizer([p], 0.05, **options) for p in model.parameters()}
    counts = dict.fromkeys(optimizers, 0)

    def step(parameter):
        counts[parameter] += 1
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for k, batch in enumerate(batches):
        loss = cross_entropy(model, batch)
        loss.backward()
        yield loss.item()
        assert {*counts.values()} == {k + 1}, "once for each backward, whatever chunks is"
        assert all(p.grad is None for p in optimizers)


def mean_square(output):
    """The mean square of an output, in single precision."""
    return output.float().square().mean()


def backward_of_autocast(model, x, dtype, where, cache=True):
    """Take a forward under autocast, and its backward somewhere.

    Args:
        where: backward is "outside" of the block, "within" it, or within a block "in the other
            dtype".
    """
    device = x.device.type
    with torch.autocast(device, dtype, cache_enabled=cache):
        output = model(x)
        assert output.dtype is dtype
        loss = mean_square(output)
        if where == "within":
            loss.backward()
    if where == "outside":
        loss.backward()
    elif where == "in the other dtype":
        with torch.autocast(device, BF16 if dtype is FP16 else FP16):
            loss.backward()


class Casting(nn.Module):
    """A layer that enters autocast itself, twice, with one weight."""

    def __init__(self, dtype):
        super().__init__()
        self.linear, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x):
        with torch.autocast(x.device.type, BF16):
            x = self.linear(x).float()
        with torch.autocast(x.device.type, self.dtype):
            return self.linear(x).float()
