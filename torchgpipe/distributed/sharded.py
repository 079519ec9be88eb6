"""Layers that FSDP2 has sharded over other processes, with a pipeline in each of them.

FSDP2 gathers parameters before a layer runs, and reduces their gradients when backward is through
it. In a pipeline that would be once for each micro-batch. So the layers of a stage are whole for
all of a step, and their gradients are reduced once, at its end. The backward of a cell ends at the
parameters, without adding to their ``grad``, so FSDP2 finds nothing to reduce before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from torchgpipe._torch import pipelining
from torchgpipe._torch.modules import modules_of
from torchgpipe.partition.sharding import is_sharded
from torchgpipe.values.blocks import contextmanager

__all__: list[str] = []


def sharded_in(partitions: Sequence[nn.Module]) -> list[Any]:
    """The outermost sharded modules."""
    found: list[Any] = []
    inner: set[nn.Module] = set()
    for partition in partitions:
        for module in modules_of(partition):
            if is_sharded(module) and module not in inner:
                found.append(module)
                inner.update(module.modules())
    return found


@contextmanager
def whole(modules: Sequence[Any]) -> Iterator[None]:
    """Gather all parameters for a ``with`` block, and let go of them after it."""
    for module in modules:
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
        module.set_is_last_backward(False)
        for each in module.modules():
            if is_sharded(each):
                each.unshard()
    try:
        yield
    finally:
        for module in modules:
            for each in module.modules():
                if is_sharded(each):
                    each.reshard()


def reduce(modules: Sequence[Any]) -> None:
    """Reduce the gradients of whole parameters to those of their shards."""
    for module in modules:
        pipelining.reduce_gradients(module)
