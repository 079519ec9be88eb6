"""A model whose partitions hand skips on, for pipelines that know no skips.

A partition hands the next one a tuple: the value, and every skip that an earlier partition stashed
and a later one pops. The devices between receive the skip, hold it and send it on::

       ┌───────────┐  value  ┌───────────┐  value  ┌───────────┐
    ──→│ stash("a")│────────→│           │────────→│ pop("a")  │──→
       │           │────────→│           │────────→│           │
       └───────────┘    a    └───────────┘    a    └───────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from torchgpipe.skip.tracker import Skip, SkipTracker, inspect_skip_layout, skips, use_skip_tracker

__all__ = ["carried"]


class Carrier(nn.Module):
    """A partition that takes skips beside its input, and returns skips beside its output.

    Its arguments are the previous partition's output, as one tuple or tensor by tensor.

    Args:
        layers: of the partition.
        arriving: skips that come with the input.
        leaving: skips that go with the output.
        first: whether the input is the model's.
        last: whether the output is the model's.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        arriving: Sequence[Skip],
        leaving: Sequence[Skip],
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.arriving, self.leaving = arriving, leaving
        self.first, self.last = first, last

    def forward(self, *parts: Any) -> Any:
        if not self.first:
            value, carried = self.unpacked(parts[0] if isinstance(parts[0], tuple) else parts)
        else:
            (value,), carried = parts, ()
        tracker = SkipTracker(dict(zip(self.arriving, carried)))
        with use_skip_tracker(tracker):
            value = self.layers(value)
        if self.last:
            return value
        if isinstance(value, tuple) and len(value) == 1:
            raise TypeError("between partitions, one tensor must not be in a tuple of its own")
        values = value if isinstance(value, tuple) else (value,)
        return (*values, *[tracker.load(skip) for skip in self.leaving])

    def unpacked(self, parts: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """Split arguments into the value, and the skips after it."""
        count = len(parts) - len(self.arriving)
        values = parts[:count]
        return values[0] if count == 1 else values, parts[count:]


def carried(layers: nn.Sequential, balance: Sequence[int]) -> nn.Sequential:
    """Make a module of each partition; the modules hand skips on.

    A layer must return a tensor or a tuple of several tensors, and stash tensors.

    Args:
        layers: of the model, which is changed: its layers no longer declare their skips.
        balance: number of layers in each partition.
    """
    rest = iter(layers)
    blocks = [nn.Sequential(*islice(rest, count)) for count in balance]
    layout = inspect_skip_layout(blocks)
    ends = [
        (skip, source, target)
        for source, stashed in enumerate(layout.stashed)
        for skip, target in stashed.items()
    ]
    # The skips that cross each cut.
    crossing = [[skip for skip, j, k in ends if j < cut <= k] for cut in range(len(blocks) + 1)]
    for layer in layers.modules():
        hide(layer)
    return nn.Sequential(
        *[
            Carrier(block, crossing[j], crossing[j + 1], j == 0, j + 1 == len(blocks))
            for j, block in enumerate(blocks)
        ]
    )


def hide(layer: nn.Module) -> None:
    """Make a layer declare no skips; otherwise GPipe would make portals of them."""
    kind = type(layer)
    if skips(layer) != ([], []):
        layer.__class__ = type(kind.__name__, (kind,), {"skips_declared": None})
