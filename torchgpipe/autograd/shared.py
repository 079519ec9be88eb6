"""Shared: one tensor for several users, whose gradients are added when all have arrived.

Autograd adds up gradients as soon as they arrive, on the stream of the node that receives them. If
the last device used the first device's weight itself, the first would wait, in the middle of its
backward, until the last is done. So each user gets an alias. The gradients are added in the
backward of this function, which runs when the last of them has arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled

__all__: list[str] = []


def shared(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """Make ``count`` aliases of a tensor, which share its memory, as views do."""
    found: tuple[Tensor, ...] = Shared.apply(tensor, count)
    return found


class Shared(torch.autograd.Function):
    """Share a tensor: ``tensor, count → *tensors``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for _ in range(count)])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:
                # Not in place, since hooks may hold what has come.
                # PyTorch adds a sparse gradient to a dense one, and not the other way round.
                pair = (total, grad) if total is None or not total.is_sparse else (grad, total)
                total = grad if pair[0] is None else pair[0] + pair[1]
        return total, None
