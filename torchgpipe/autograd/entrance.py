"""The beginning of a cell's graph, for cells whose backward runs by itself."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled

__all__: list[str] = []


class Enter(torch.autograd.Function):
    """Make tensors the beginning of a graph: ``phony, *tensors → *tensors``.

    Backward of the cell ends at this node, with the gradients of the tensors. Unlike leaves, the
    tensors are not kept alive by their graph, and layers may change them in place.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(
            "under a schedule, a gradient must come by the loss, since the stages before this one "
            "have run their backward already (gradient of: a value that a layer has kept, such as "
            "an auxiliary loss); have the layer return it as an output, and add it in the loss "
            "function"
        )
