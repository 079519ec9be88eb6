"""A layer that takes a given virtual time, to stand for a real one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Busy"]

_ops: Any = torch.ops.virtual_accelerator


class Busy(nn.Module):
    """A stand-in for a layer, or a partition, of known cost: ``output = input * weight``.

    On devices that are not virtual, it computes the same and spends no further time.

    Args:
        forward: the cost of a forward, in milliseconds of virtual time.
        input: the cost of the backward for the input, if a gradient of the input is needed.
        weight: the cost of the backward for the weight, likewise.
        features: the size of the last dimension of the input, and of the weight.
        name: the name of the layer in spans, where F, I or W stands before it.

    Shape:
        The input has any shape with ``features`` in the last dimension, and the output the same.
    """

    def __init__(
        self,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        *,
        features: int = 1,
        name: str = "",
    ) -> None:
        super().__init__()
        for cost in (forward, input, weight):
            if not 0 <= cost < float("inf"):
                raise ValueError(
                    "the costs of a busy layer are times in milliseconds "
                    f"(forward: {forward}, input: {input}, weight: {weight}); use 0 for what takes "
                    "no time"
                )
        self.costs = (float(forward), float(input), float(weight))
        self.name = name
        self.weight = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = BusyFunction.apply(input, self.weight, self.costs, self.name)
        return output

    def extra_repr(self) -> str:
        forward, input, weight = self.costs
        return f"forward={forward}, input={input}, weight={weight}"


class BusyFunction(torch.autograd.Function):
    """``input, weight, costs, name → output``."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, costs: tuple[float, float, float], name: str
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.costs, ctx.name = costs, name
        _spend(input, costs[0], "F" + name)
        return input * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = None
        _, cost_input, cost_weight = ctx.costs
        if ctx.needs_input_grad[0]:
            _spend(grad, cost_input, "I" + ctx.name)
            grad_input = grad * weight
        if ctx.needs_input_grad[1]:
            _spend(grad, cost_weight, "W" + ctx.name)
            grad_weight = (grad * input).sum_to_size(weight.shape)
        return grad_input, grad_weight, None, None


def _spend(tensor: Tensor, cost: float, name: str) -> None:
    if hasattr(_ops, "busy"):
        _ops.busy(tensor, cost, name)
