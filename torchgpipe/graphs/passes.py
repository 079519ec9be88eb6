"""A part's last passes: they choose what R computes again, and compile what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from torchgpipe.graphs.joint import (
    Effects,
    Joint,
    bytes_of,
    has_statistics,
    is_item,
    is_random,
    is_void,
    tensors_of,
)
from torchgpipe.graphs.slices import Function, Slice, graph_of

__all__: list[str] = []


# The passes that choose what R computes again, and so what a cell keeps from F until then.
#
# ``everything``: the whole forward, from the input. ``min_cut``: only cheap operators, from the
# values that take the fewest bytes. Matrix products and convolutions are not recomputed, nor are
# operators that draw random numbers or change memory in place; norms, activations and other
# elementwise operators are. The kept values are a minimum cut, by bytes, between the nodes that
# cannot be recomputed, inputs included, and the nodes that backward needs.
#
# Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), for the
# first; He and Yang, Min-cut optimal (re)materialization (dev-discuss.pytorch.org, 2022), for the
# second.


class Again(NamedTuple):
    """A choice of the nodes to recompute.

    Args:
        kept: the nodes whose values a cell keeps from F until R.
        nodes: the nodes that R computes, in order.
    """

    kept: list[Node]
    nodes: list[Node]


#: Chooses what is computed again, to get the values of some nodes.
Choice = Callable[[Joint, Effects, Sequence[Node]], Again]


def everything(joint: Joint, effects: Effects, saved: Sequence[Node]) -> Again:
    """Recompute everything that the backward needs, from the input and what layers keep."""
    forward = joint.forward
    # guard: random numbers in the same order
    others = [x for x in forward if is_random(x) or is_void(x)]
    # guard: what layers keep of a graph
    region = {*forward} - joint.kept
    nodes = effects.in_order(effects.needed([*saved, *others], region))
    given = {*joint.inputs, *joint.more, *joint.kept.intersection(forward)}
    taken = {*saved, *[x for node in nodes for x in node.all_input_nodes]}
    return Again(effects.in_order(taken & given), nodes)


def min_cut(joint: Joint, effects: Effects, saved: Sequence[Node]) -> Again:
    """Recompute cheap operators only, from the values that take the fewest bytes."""
    # A dependency of PyTorch.
    import networkx  # type: ignore[import-untyped]

    forward = joint.forward
    region = effects.needed(saved, {*forward})
    fixed = {x for x in forward if x in joint.kept or _is_fixed(effects, x)}
    # The items of what a fixed operator returns are fixed, too.
    fixed |= {x for x in forward if is_item(x) and x.args[0] in fixed}
    given = {*joint.inputs, *joint.more}
    graph: Any = networkx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    for x in [*given, *region]:
        whole = isinstance(x.meta.get("val"), tuple | list)
        graph.add_edge((x, 0), (x, 1), capacity=inf if whole else bytes_of(tensors_of(x)))
        if x in given or x in fixed:
            graph.add_edge("source", (x, 0))
        if x in region and x not in fixed:
            for y in x.all_input_nodes:
                if y in given or y in region:
                    graph.add_edge((y, 1), (x, 0))
    for x in saved:
        graph.add_edge((x, 1), "sink")
    _, (near, _) = networkx.minimum_cut(graph, "source", "sink")
    kept = {x for x in [*given, *region] if (x, 0) in near and (x, 1) not in near}
    nodes = effects.needed([x for x in saved if x not in kept], region - kept)
    return Again(effects.in_order(kept), effects.in_order(nodes))


def _is_fixed(effects: Effects, node: Node) -> bool:
    """Whether a node must not be recomputed."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry or is_random(node) or is_void(node) or node in effects.written:
        return True
    # Memory that is changed in place has another value by then.
    touched = effects.memory[node] | effects.reads(node)
    return any(x in effects.writers for x in touched)


CHOICES: dict[str, Choice] = {"everything": everything, "min-cut": min_cut}


# Compiled parts: PyTorch's compiler makes one function of all operators of a part.
#
# Each part is compiled on its own, when a schedule asks for it first. A compiler may compute in
# another order, and draw other random numbers, than the operators do one by one.


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
