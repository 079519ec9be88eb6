"""A model whose layers sleep, as layers on a device sleep for the host that waits for them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["sleeping"]


class Sleep(torch.autograd.Function):
    """``input, seconds → input``; the backward sleeps twice as long as the forward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, seconds: float) -> Tensor:
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return input.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Layer(nn.Module):
    """Multiply by a weight, and sleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = Sleep.apply(input * self.weight, self.seconds)
        return output


def sleeping(layers: int, seconds: float) -> nn.Sequential:
    """Layers that take no processor: threads sleep side by side on one core.

    Args:
        layers: number of layers.
        seconds: of a layer's forward; its backward takes twice as long.
    """
    return nn.Sequential(*[Layer(seconds) for _ in range(layers)])
