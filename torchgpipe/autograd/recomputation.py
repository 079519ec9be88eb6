"""The nodes of recomputation: the one that starts it, and the one that its input hangs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.fork_join import get_phony, pass_on

__all__: list[str] = []


class Recompute(torch.autograd.Function):
    """A fork whose backward recomputes first: ``due, *tensors → *tensors, phony``."""

    @staticmethod
    def forward(ctx: Any, due: list[Callable[[], None]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.due = due
        phony = get_phony(tensors[0].device, requires_grad=False).detach()
        return (*pass_on(ctx, tensors), phony)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for recompute in ctx.due:
            recompute()
        return (None, *grads[:-1])


class Unpack(torch.autograd.Function):
    """Make tensors require a gradient that nobody will ask for: ``phony, *tensors → *tensors``.

    As leaves, the tensors would be held by all that is computed from them. As outputs of this
    function, a recomputation lets go of what is popped at its last use, as the first run did.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return (None, *[None] * len(grads))
