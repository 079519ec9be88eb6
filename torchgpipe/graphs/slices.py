"""Slices: some nodes of a joint graph as a graph, and a function, of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node

from torchgpipe.graphs.direct import call_directly
from torchgpipe.graphs.effects import Effects
from torchgpipe.graphs.joint import Joint
from torchgpipe.graphs.masks import as_one

__all__: list[str] = []

#: A function of a list of tensors, which it empties, so that each is freed after its last use.
Function = Callable[[list[Any]], Sequence[Any]]


class Slice(NamedTuple):
    """A part of a joint graph.

    Args:
        inputs: the nodes whose values it is given.
        nodes: the nodes that it computes, in order.
        outputs: the nodes whose values it returns; None stays None.
    """

    inputs: list[Node]
    nodes: list[Node]
    outputs: list[Node | None]


def sliced(nodes: Sequence[Node], outputs: Iterable[Node | None]) -> Slice:
    """Make a slice of some nodes; its inputs are all other nodes whose values they take."""
    own = set(nodes)
    found = [*outputs]
    taken = [x for node in nodes for x in node.all_input_nodes]
    taken += [x for x in found if x is not None]
    return Slice([*dict.fromkeys(x for x in taken if x not in own)], [*nodes], found)


def crossing(
    effects: Effects, inside: Collection[Node], behind: Iterable[Node], results: Iterable[Node]
) -> list[Node]:
    """The nodes of one slice whose values a later one takes, in order.

    Args:
        effects: the effects of the graph.
        inside: the nodes of the first slice.
        behind: the nodes of the later slice.
        results: the outputs of the later slice.
    """
    found = {x for node in behind for x in node.all_input_nodes if x in inside}
    found |= {x for x in results if x in inside}
    return effects.in_order(found)


def graph_of(part: Slice, twins: Mapping[Node, Node]) -> Graph:
    """The graph of a slice, with a placeholder for each input.

    Args:
        part: the slice.
        twins: for each node that a mask has split in two, its other half.
    """
    graph = Graph()
    known: dict[Node, Node] = {}
    for node in part.inputs:
        known[node] = graph.placeholder(node.name)
        known[node].meta = node.meta
    _fill(graph, part, known, twins)
    return graph


def function_of(joint: Joint, part: Slice) -> Function:
    """Make a function of a slice.

    The function takes its arguments out of a list. Otherwise its caller would hold all of them
    until the end, and what one slice hands to the next is most of a stage's memory.
    """
    graph = Graph()
    box = graph.placeholder("values")
    known: dict[Node, Node] = {}
    for node in reversed(part.inputs):
        known[node] = graph.call_method("pop", (box,))
    _fill(graph, part, known, joint.twins)
    call_directly(graph)
    function: Function = GraphModule(joint.module, graph).forward
    return function


def _fill(graph: Graph, part: Slice, known: dict[Node, Node], twins: Mapping[Node, Node]) -> None:
    for node in part.nodes:
        twin = twins.get(node)
        if twin in known:
            known[node] = known[twin]
            as_one(known[node], twin, node)
            continue
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output([None if x is None else known[x] for x in part.outputs])
