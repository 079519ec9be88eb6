"""A model whose partitions carry skips along, as partitions have to that know no skips.

Between two of them goes a tuple: the value, and every skip that was stashed before and is popped
later, on its way through all partitions between. In a pipeline the devices between receive it, hold
it and send it on::

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

from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.namespace import Skip
from torchgpipe.skip.skippable import skips
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker

__all__ = ["carried"]


class Carrier(nn.Module):
    """A partition that takes and gives skips beside the value.

    Its argument is what the partition before it gave, as a tuple or tensor by tensor.

    Args:
        layers: of the partition.
        arriving: the skips that come with the input.
        leaving: the skips that go with the output.
        first: whether its input is the model's.
        last: whether its output is the model's.
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
        """The value, and the skips behind it."""
        count = len(parts) - len(self.arriving)
        values = parts[:count]
        return values[0] if count == 1 else values, parts[count:]


def carried(layers: nn.Sequential, balance: Sequence[int]) -> nn.Sequential:
    """Makes a module of each partition, between which skips are carried.

    What a layer gives has to be a tensor or a tuple of several, and what is stashed a tensor.

    Args:
        layers: of the model. They are the partitions' from then on: nobody else sees their skips.
        balance: how many of them there are in each partition.
    """
    rest = iter(layers)
    blocks = [nn.Sequential(*islice(rest, count)) for count in balance]
    layout = inspect_skip_layout(blocks)
    ends = [
        (skip, source, target)
        for source, stashed in enumerate(layout.stashed)
        for skip, target in stashed.items()
    ]
    # Of each cut, the skips that cross it.
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
    """Has a layer stash and pop as before, but declare nothing: GPipe would make portals of it."""
    kind = type(layer)
    if skips(layer) != ([], []):
        layer.__class__ = type(kind.__name__, (kind,), {"skips_declared": None})
