"""Compiled parts: PyTorch's compiler makes one function of all operators of a part.

Each part is compiled on its own, when a schedule asks for it first. A compiler may compute in
another order, and draw other random numbers, than the operators do one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torchgpipe.graphs.effects import Effects, has_statistics
from torchgpipe.graphs.joint import Joint
from torchgpipe.graphs.slices import Function, Slice, graph_of

__all__: list[str] = []


def compiler(backend: str | Callable[..., Any]) -> Callable[[Joint, Slice], Function]:
    """Make a compiler, which turns a slice of a graph into a function.

    Args:
        backend: as for :func:`torch.compile`.
    """

    def make(joint: Joint, part: Slice) -> Function:
        module = GraphModule(joint.module, graph_of(part, joint.twins))
        if not part.nodes:
            # There is nothing to compile.
            return lambda values: module.forward(*_taken(values))
        # Without fullgraph=True, for which PyTorch counts what it has compiled in all threads at
        # once. A graph of operators has no break anyway.
        function = torch.compile(module, backend=backend, dynamic=False)
        places = _statistics(joint, part)

        def run(values: list[Any]) -> Sequence[Any]:
            for k in places:
                values[k] = values[k].data
            found: Sequence[Any] = function(*_taken(values))
            return found

        return run

    return make


def _statistics(joint: Joint, part: Slice) -> list[int]:
    """The indices, among the inputs of a part, of the running statistics of norms.

    PyTorch's norms update them without a change of their version counter. Compiled code updates
    them by ``copy_``, which changes it. Then the backward of an eager cell would refuse statistics
    that it has saved, though it does not read them. So a compiled part is given aliases with
    version counters of their own.
    """
    effects = Effects(joint.module.graph.nodes)
    found = []
    for k, node in enumerate(part.inputs):
        writers = [x for own in effects.memory[node] for x in effects.writers.get(own, ())]
        if writers and all(map(has_statistics, writers)):
            found.append(k)
    return found


def _taken(values: list[Any]) -> Sequence[Any]:
    """Take the values out of a list."""
    found = tuple(values)
    values.clear()
    return found
