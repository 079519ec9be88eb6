"""Layers that differ in their recomputation, and inputs for them."""

from contextlib import nullcontext

import torch
from torch import nn

from torchgpipe import is_recomputing
from torchgpipe.ambient.context import Context
from torchgpipe.devices.streams import current_stream
from torchgpipe.recompute.checkpoint import Checkpoint, trigger
from torchgpipe.values.microbatch import Batch

CHECKPOINTED = ["except_last", "always"]
M = 3


class Differs(nn.Module):
    """A layer that computes something else the second time, in one of the micro-batches."""

    def __init__(self, first, second, rows):
        super().__init__()
        self.first, self.second, self.rows = first, second, rows

    def forward(self, x):
        differs = is_recomputing() and bool((x[:, 0] == self.rows).any())
        return (self.second if differs else self.first)(x)


class Add(torch.autograd.Function):
    """A function that saves the tensors that it gets."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        found = ctx.saved_tensors
        return (grad, *[None for _ in found])


def saving(*shapes, dtype=torch.float):
    return lambda x: Add.apply(x, *[torch.ones(shape, dtype=dtype) for shape in shapes])


def numbered():
    """An input whose rows hold the number of their micro-batch."""
    return torch.arange(M).repeat_interleave(2)[:, None].expand(-1, 2).float().requires_grad_()


def checkpoint(function, input):
    """Run a function of nested structures of tensors as a checkpointed cell whose output stays."""
    batch = Batch(input)
    if not torch.is_grad_enabled():
        return function(input)
    stream = current_stream(batch[0].device)
    made = Checkpoint(
        *(lambda batch: batch.call(function), Context(), stream, nullcontext()),
        *({}, False, {}),
    )
    return made.forward(batch).value


def forked(function, input, lasting=None):
    """Run a checkpoint as a cell does whose output leaves the device."""
    made = Checkpoint(
        lambda batch: batch.call(function),
        Context(),
        current_stream(input.device),
        nullcontext(),
        *(lasting or {}, False, {}),
    )
    (output,), _ = trigger([made], tuple(made.forward(Batch(input))))
    return output
