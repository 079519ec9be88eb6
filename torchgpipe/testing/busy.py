"""A layer that takes a given virtual time, to stand for a real one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.checks import MOST, finite, is_number, shown, verify, verify_kind

__all__ = ["Busy"]

_ops: Any = torch.ops.virtual_accelerator


class Busy(nn.Module):
    """A stand-in for a layer, or a partition, of known cost: ``output = input * weight``.

    On devices that are not virtual, it computes the same and spends no further time.

    Args:
        forward: the cost of a forward, in milliseconds of virtual time.
        input: the cost of the backward for the input, if a gradient of the input is needed.
        weight: the cost of the backward for the weight in the same way.
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
            if not (is_number(cost) and finite(cost) and cost >= 0):
                raise ValueError(
                    "the costs of a busy layer are times in milliseconds "
                    f"(forward: {shown(forward)}, input: {shown(input)}, weight: {shown(weight)}); "
                    "use 0 for what takes no time"
                )
        valid = type(features) is int and 0 < features <= MOST
        rule, remedy = f"features must be from 1 to {MOST}", "pass the size of the weight"
        verify(valid, rule, "features", features, remedy)
        verify_kind(name, str, "the name of a busy layer is a text", "name", "pass such as 'block'")
        self.costs = (float(forward), float(input), float(weight))
        self.name = name
        self.weight = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, input: Tensor) -> Tensor:
        return busy(input, self.weight, self.costs, self.name)

    def extra_repr(self) -> str:
        forward, input, weight = self.costs
        return f"forward={forward}, input={input}, weight={weight}"


def busy(input: Tensor, weight: Tensor, costs: tuple[float, float, float], name: str) -> Tensor:
    """Compute a busy layer, which lasts for the time of F, and in backward for those of I and W."""
    forward, inputs, weights = costs
    # Backward runs the node first that was made last: so the node of W is made before that of I.
    weight = Spend.apply(weight, 0.0, "", weights, "W" + name)
    output: Tensor = Spend.apply(input, forward, "F" + name, inputs, "I" + name) * weight
    return output


class Spend(torch.autograd.Function):
    """``tensor, forward, its name, backward, its name → tensor``: pass on, and take time.

    There is one for the input, and another one for the weight, so that backward can be run for one
    of them alone.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: float, name: str, backward: float, its_name: str
    ) -> Tensor:
        ctx.backward = backward, its_name
        if forward:
            _spend(tensor, forward, name)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cost, name = ctx.backward
        if cost:
            _spend(grad, cost, name)
        return grad, None, None, None, None


def _spend(tensor: Tensor, cost: float, name: str) -> None:
    if hasattr(_ops, "busy"):
        _ops.busy(tensor, cost, name)
