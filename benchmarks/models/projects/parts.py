"""Layers that several of the models have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Attention", "FeedForward", "RMSBlock", "heads", "rotated"]


def heads(x: Tensor, count: int) -> Tensor:
    """Divide features among heads: (rows, length, width) to (rows, heads, length, part)."""
    found: Tensor = x.unflatten(-1, (count, -1)).transpose(1, 2)
    return found


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of features by angles of shape (rows, length, part / 2)."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Module):
    """Attention to oneself, or to a context, with a norm in front.

    Args:
        width: the features.
        count: the number of heads.
        context: the features of the context; None for attention to oneself.
        causal: whether a place sees those before it alone.
    """

    def __init__(
        self, width: int, count: int = 2, context: int | None = None, causal: bool = False
    ) -> None:
        super().__init__()
        self.count, self.causal = count, causal
        self.norm = nn.LayerNorm(width)
        self.norm_context = nn.LayerNorm(context) if context else None
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(context or width, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Any:
        """Attend; the mask is true where something is to be seen."""
        x = self.norm(x)
        if context is None:
            context = x
        elif self.norm_context is not None:
            context = self.norm_context(context)
        q, k, v = [heads(y, self.count) for y in (self.to_q(x), *self.to_kv(context).chunk(2, -1))]
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.to_out(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """A norm, and two linear layers."""

    def __init__(self, width: int, times: int = 4) -> None:
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, times * width),
            nn.GELU(),
            nn.Linear(times * width, width),
        )


class RMSBlock(nn.Module):
    """A decoder block of a Llama: rotated keys and queries, a gated feed-forward."""

    def __init__(self, width: int, count: int = 2) -> None:
        super().__init__()
        self.count = count
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Any:
        """Attend to what came before, and think."""
        q, k, v = [heads(y, self.count) for y in self.qkv(self.norm_1(x)).chunk(3, -1)]
        q, k = rotated(q, angles), rotated(k, angles)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
