"""Compiled parts: PyTorch's compiler makes one function of all operators of a part.

Each part is compiled on its own, when a schedule asks for it first. A compiler may compute in
another order, and draw other random numbers, than the operators do one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torchgpipe.graphs.joint import Joint
from torchgpipe.graphs.slices import Function, Slice, graph_of

__all__: list[str] = []


def compiler(backend: str | Callable[..., Any]) -> Callable[[Joint, Slice], Function]:
    """Make a function that makes functions of slices.

    Args:
        backend: as for :func:`torch.compile`.
    """

    def make(joint: Joint, part: Slice) -> Function:
        module = GraphModule(joint.module, graph_of(part, joint.twins))
        if not part.nodes:
            # There is nothing to compile.
            return lambda values: module.forward(*_taken(values))
        function = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
        return lambda values: function(*_taken(values))

    return make


def _taken(values: list[Any]) -> Sequence[Any]:
    """The values of a list, which is empty then."""
    found = tuple(values)
    values.clear()
    return found
