"""Values of the first run of a cell that its recomputation gets, too, whatever that one computes.

Recomputations find random numbers, modes and buffers as they were. But an operator that adds in
another order, as some do on accelerators, may break a tie the other way. A router that sends rows
to experts would send other rows then, and the gradients would be of another function.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.fork_join import Unpack, get_phony
from torchgpipe.autograd.versions import version_of
from torchgpipe.recompute.phase import phase
from torchgpipe.recompute.slots import described, mismatch, modified
from torchgpipe.values import trees

__all__ = ["keep"]

Value = TypeVar("Value")


class Values(list[tuple[Any, int]]):
    """The leaves of values that layers of one cell have kept, in order, each with its version.

    The version counts for tensors. Each checkpointed cell has such a list, and few fill it.
    """

    __slots__ = ()

    def put(self, leaf: Any) -> Any:
        """Keep a leaf of the first run, and return it."""
        if isinstance(leaf, Tensor):
            # guard: kept values without their graph
            self.append((leaf.detach(), version_of(leaf)))
        else:
            self.append((leaf, 0))
        return leaf

    def take(self, leaf: Any) -> Any:
        """The leaf of the first run in place of the one of the second.

        Raises:
            RuntimeError: the recomputation keeps another kind of value, or more of them; or the
                kept one was changed in place since.
        """
        if not self:
            raise mismatch("a further value that is kept", "nothing more")
        found, version = self.pop(0)
        if not isinstance(leaf, Tensor):
            return found
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            kept = described(found, None) if isinstance(found, Tensor) else type(found).__name__
            raise mismatch(described(leaf, None), kept)
        # guard: versions of kept values
        if version_of(found) != version:
            raise modified(found, version, None)
        if not leaf.requires_grad:
            return found
        # Operators save what they do for a tensor in the middle of a graph.
        with torch.enable_grad():
            (again,) = Unpack.apply(get_phony(found.device, requires_grad=True), found)
        return again


@uncompiled
def keep(value: Value) -> Value:
    """Keep a value for the recomputation of a checkpointed cell; a layer calls this in its forward.

    ::

        def forward(self, x):
            scores = self.router(x)
            experts = keep(scores.topk(2).indices)
            weights = scores.gather(-1, experts)
            ...

    What the first run has computed is what the recomputation gets, even if it computes something
    else.
    So compute with what is returned: the operators before save what the recomputation computes, as
    ``topk`` does for the gradient of its values. The layers must keep as many values in both runs,
    in the same order. A kept value takes memory until its cell is computed again.

    Where nothing is computed again, the value is returned as it is. That is also so within a
    checkpoint of PyTorch, whose recomputations are its own.

    Args:
        value: any nested structure of tensors and other objects.

    Returns:
        The value, or that of the first run.
    """
    values = phase.values
    if values is None:
        return value
    found: Value = trees.map_leaves(values.take if phase.recomputing else values.put, value)
    return found
