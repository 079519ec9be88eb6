"""A stand-in for a collective within a layer: it takes time, and no arithmetic of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.graphs.overlap import communicates

__all__ = ["Exchange"]


def _define() -> None:
    ops: Any = torch.ops.virtual_accelerator

    @torch.library.custom_op("torchgpipe_benchmarks::exchange", mutates_args=())
    def exchange(x: Tensor, cost: float, back: float) -> Tensor:
        if hasattr(ops, "busy"):
            ops.busy(x, cost, "exchange")
        return x.clone()

    @exchange.register_fake
    def _(x: Tensor, cost: float, back: float) -> Tensor:
        return torch.empty_like(x)

    def keep(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        _, ctx.cost, ctx.back = inputs

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        found: Tensor = exchange(grad, ctx.back, ctx.cost)
        return found, None, None

    exchange.register_autograd(backward, setup_context=keep)
    communicates(torch.ops.torchgpipe_benchmarks.exchange)


class Exchange(nn.Module):
    """Communicate in forward, and in backward.

    Args:
        forward: the cost in forward, in milliseconds of virtual time.
        backward: the cost in backward.
    """

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        if not hasattr(torch.ops.torchgpipe_benchmarks, "exchange"):
            _define()
        self.costs = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.torchgpipe_benchmarks.exchange(x, *self.costs)
        return found
