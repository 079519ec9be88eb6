"""Tidying: leave nodes out that compute nothing.

Each node costs the host two microseconds or three, in each micro-batch.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torchgpipe.graphs.effects import Effects, is_random, is_void
from torchgpipe.graphs.joint import Joint, tensors_of

__all__: list[str] = []

aten = torch.ops.aten

#: Operators that return their argument.
SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
#: Operators that return their argument, if it has the shape already.
RESHAPES = {aten.view.default, aten.expand.default, aten.reshape.default}


def tidy(joint: Joint) -> Joint:
    """Remove operators that return their argument, double transpositions, and unused nodes."""
    graph = joint.module.graph
    effects = Effects(graph.nodes)
    for node in joint.calls:
        same = _same(node)
        # A node that is used after a change in place must not be replaced by one from before it.
        # guard: changes in place before a reference
        if same is not None and not effects.between(same, node):
            joint.replace(node, same)
    calls = joint.calls
    kept = effects.needed(
        [*joint.results, *[x for x in calls if is_void(x) or is_random(x)], *effects.written],
        set(calls),
    )
    for node in reversed(calls):
        if node not in kept:
            graph.erase_node(node)
    joint.backward &= kept
    return joint


def _same(node: Node) -> Node | None:
    """An earlier node with the same value."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target in SAME:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        before = source.args[0]
        return before if isinstance(before, Node) else None
    if node.target in RESHAPES:
        (a,), (b,) = tensors_of(node), tensors_of(source)
        return source if a.shape == b.shape and a.stride() == b.stride() else None
    return None
