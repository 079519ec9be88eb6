"""The beginning of a cell's graph, for cells whose backward runs by itself."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe._torch.names import has
from torchgpipe.autograd.phony import get_phony

__all__: list[str] = []

MESSAGE = (
    "under a schedule, a gradient must come by the loss, since the stages before this one have run "
    "their backward already (gradient of: a value that a layer has kept, such as an auxiliary "
    "loss); have the layer return it as an output, and add it in the loss function"
)


def enter(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make tensors the beginning of a graph.

    Backward of the cell ends at the node of the results, with their gradients. Unlike leaves, the
    results are not kept alive by their graph, and layers may change them in place.
    """
    phony = get_phony(tensors[0].device, requires_grad=True)
    # What arrives is a leaf, which the graph would keep for the gradient.
    # guard: letting go of what arrives
    detached = [x.detach() for x in tensors]
    if _has_node() and all(type(x) is Tensor for x in detached):
        # A node without Python, which would make a plain tensor of a subclass.
        _, *found = _torch.dead_end(MESSAGE.encode(), 1 + len(detached))(phony, *detached)
        return tuple(found)
    entered: tuple[Tensor, ...] = Enter.apply(phony, *detached)
    return entered


@cache
def _has_node() -> bool:
    return has("dead_end")


class Enter(torch.autograd.Function):
    """The same for any tensors: ``phony, *tensors → *tensors``."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(MESSAGE)
