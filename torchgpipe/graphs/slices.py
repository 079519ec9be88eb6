"""Slices of a joint graph, as functions: halves, without idle operators, and what R computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import flop_registry

from torchgpipe._torch.attributes import schema_of
from torchgpipe.graphs.joint import Effects, Joint, fakes_of, is_item, is_random, is_void

__all__: list[str] = []


def split_masks(joint: Joint) -> Joint:
    """Make two nodes of each operator that computes gradients of both kinds by a mask.

    ``convolution_backward`` computes the gradients of the input, the weight and the bias at once,
    unless its mask says otherwise. Cut as it is, all of it would be in I, and W would be empty. Two
    of it, with masks that complete each other, do the same arithmetic. In a norm that is little,
    and W would have to keep the norm's input for it. So only operators whose operations PyTorch
    counts become two: convolutions and products of matrices.

    Returns:
        A copy. Where I and W are one B, one operator takes less time than two.
    """
    joint = joint.copied()
    effects = Effects(joint.module.graph.nodes)
    first = effects.needed([x for x in joint.input_grads if x is not None], joint.backward)
    for node in joint.late:
        mask_index = _mask_of(node)
        early = [x for x in node.users if x in first]
        late = [x for x in node.users if x not in first]
        # An operator stays one node if it has no mask, if only one half needs its results, or if
        # another node takes its tuple of results as a whole.
        if mask_index is None or not early or not late or not all(map(is_item, node.users)):
            continue
        mask: Any = node.args[mask_index]
        with joint.module.graph.inserting_after(node):
            other = joint.module.graph.node_copy(node)
        joint.backward.add(other)
        for one, items in ((node, early), (other, late)):
            kept = {x.args[1] for x in items}
            one.update_arg(mask_index, [needed and k in kept for k, needed in enumerate(mask)])
            value = [x if k in kept else None for k, x in enumerate(one.meta["val"])]
            one.meta = {**one.meta, "val": tuple(value)}
        for item in late:
            item.update_arg(0, other)
    return joint


def _mask_of(node: Node) -> int | None:
    """The index of the mask among the arguments of an operator with much arithmetic; else None."""
    schema = schema_of(node.target)
    if schema is None or getattr(node.target, "overloadpacket", None) not in flop_registry:
        return None
    places = [k for k, x in enumerate(schema.arguments) if x.name == "output_mask"]
    return places[0] if places and places[0] < len(node.args) else None


aten = torch.ops.aten

#: Operators that return their argument unchanged, so that :func:`tidy` removes them.
SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
#: Operators that :func:`tidy` removes if their argument has the wanted shape and strides already.
RESHAPES = {aten.view.default, aten.expand.default, aten.reshape.default}


def tidy(joint: Joint) -> Joint:
    """Remove operators that return their argument, double transpositions, and unused nodes.

    Each node costs the host two microseconds or three, in each micro-batch.
    """
    graph = joint.module.graph
    effects = Effects(graph.nodes)
    for node in joint.calls:
        same = _same(node)
        # If memory is changed in place between ``same`` and ``node``, ``node`` stays: a slice that
        # took ``same`` in its place could leave the change out.
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
        (a,), (b,) = fakes_of(node), fakes_of(source)
        return source if a.shape == b.shape and a.stride() == b.stride() else None
    return None


#: Names of operators that ``torch`` also has as functions of the same arguments, faster to call.
FUNCTIONS = {"abs", "add", "addmm", "addcmul", "addcdiv", "amax", "baddbmm", "bmm", "cat"}
FUNCTIONS |= {"clone", "conj", "convolution", "cos", "cumsum", "div", "embedding", "eq"}
FUNCTIONS |= {"erf", "exp", "ge", "gt", "index_select", "le", "log", "log_softmax"}
FUNCTIONS |= {"logical_and", "logical_not", "logical_or", "lt", "masked_fill", "matmul"}
FUNCTIONS |= {"mean", "mm", "mul", "native_batch_norm", "native_dropout"}
FUNCTIONS |= {"native_layer_norm", "ne", "neg", "permute", "pow", "prod", "reciprocal"}
FUNCTIONS |= {"relu", "rsqrt", "select", "sigmoid", "sign", "sin", "softmax", "sqrt"}
FUNCTIONS |= {"squeeze", "sub", "sum", "t", "tanh", "transpose", "tril", "triu", "unsqueeze"}
FUNCTIONS |= {"where"}
#: Names of operators that tensors also have as methods of the same arguments, faster to call.
METHODS = {"expand", "reshape", "view"}


def call_directly(graph: Graph) -> None:
    """Replace operators in a graph by PyTorch's own functions and methods, where there are such.

    ``torch.ops.aten.mm.default`` looks its arguments up in a declaration, and takes a microsecond
    more than :func:`torch.mm`, which was generated for these arguments. The operator is the same.
    """
    for node in graph.nodes:
        schema = schema_of(node.target)
        if schema is None or node.kwargs or not schema.name.startswith("aten::"):
            continue
        name = schema.name.removeprefix("aten::")
        if name in METHODS:
            node.op, node.target = "call_method", name
        elif name in FUNCTIONS and callable(function := getattr(torch, name, None)):
            node.target = function


#: A function that computes a slice. It empties its list of arguments, so that each tensor is freed
#: at its last use.
SliceFunction = Callable[[list[Any]], Sequence[Any]]


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
    inside = set(nodes)
    results = [*outputs]
    used = [x for node in nodes for x in node.all_input_nodes]
    used += [x for x in results if x is not None]
    return Slice([*dict.fromkeys(x for x in used if x not in inside)], [*nodes], results)


def graph_of(part: Slice) -> Graph:
    """The graph of a slice, with a placeholder for each input."""
    graph, known = Graph(), dict[Node, Node]()
    for node in part.inputs:
        known[node] = graph.placeholder(node.name)
        known[node].meta = node.meta
    return _filled(graph, part, known)


def function_of(joint: Joint, part: Slice) -> SliceFunction:
    """Make a function of a slice.

    The function takes its arguments out of a list. Otherwise its caller would hold all of them
    until the end, and what one slice hands to the next is most of a stage's memory.
    """
    graph = Graph()
    box = graph.placeholder("values")
    known = {node: graph.call_method("pop", (box,)) for node in reversed(part.inputs)}
    call_directly(_filled(graph, part, known))
    function: SliceFunction = GraphModule(joint.module, graph).forward
    return function


def _filled(graph: Graph, part: Slice, known: dict[Node, Node]) -> Graph:
    for node in part.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output([None if x is None else known[x] for x in part.outputs])
    return graph


def without(joint: Joint, missing: Collection[int]) -> Joint:
    """Make a copy for a backward in which outputs of these indices have no gradient.

    Zeros in their place would be wrong: a weight that gets no gradient must have None, and some
    derivatives, as that of a square root at 0, turn a gradient of 0 into NaN. So what depends on
    missing gradients alone goes, and a sum with it becomes its other summand. Where another
    operator takes it beside a gradient that is there, it takes zeros, as in autograd.
    """
    joint = joint.copied()
    graph = joint.module.graph
    lost = {joint.tangents[k] for k in missing} - {None}
    there = {*joint.tangents} - lost
    for node in joint.late:
        arguments = {*node.all_input_nodes}
        if arguments & there and node.target is aten.add.Tensor and len(arguments & lost) == 1:
            (other,) = arguments - lost
            (a,), (b,) = fakes_of(other), fakes_of(node)
            if (a.shape, a.stride(), a.dtype, node.kwargs) == (b.shape, b.stride(), b.dtype, {}):
                joint.replace(node, other)
                lost.add(node)
                continue
        if not arguments & there:
            lost |= {node} if arguments & lost else set()
            continue
        there.add(node)
        for x in arguments & lost:
            assert x is not None
            with graph.inserting_before(node):
                (like,) = fakes_of(x)
                zeros = graph.call_function(
                    _zeros, (like.shape, like.stride(), like.dtype, like.device)
                )
            zeros.meta = {**x.meta}
            joint.backward.add(zeros)
            node.replace_input_with(x, zeros)
    joint.input_grads = [None if x in lost else x for x in joint.input_grads]
    joint.weight_grads = [None if x in lost else x for x in joint.weight_grads]
    joint.tangents = [None if x in lost else x for x in joint.tangents]
    graph.output_node().args = (joint.results,)
    for node in reversed(joint.calls):
        if node in lost:
            graph.erase_node(node)
            joint.backward.discard(node)
    return tidy(joint)


def _zeros(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def backward(joint: Joint) -> Slice:
    """The whole backward (B), which returns the gradients of the input, then of the weights."""
    return sliced(joint.late, [*joint.input_grads, *joint.weight_grads])


def halves(joint: Joint) -> tuple[Slice, Slice]:
    """Cut the backward in two: all that the gradients of the input need, and the rest.

    Values that both need are computed in I, and handed to W.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241).

    Returns:
        I, which returns the gradients of the input, then what W takes from it; and W, which returns
        the gradients of the weights.
    """
    effects = Effects(joint.module.graph.nodes)
    nodes = joint.late
    region = set(nodes)
    wanted = [x for x in joint.input_grads if x is not None]
    first = effects.needed(wanted, region)
    if first:
        # An operator without a result is there for a side effect, such as sending a message. It is
        # in I if I computes all its arguments that the backward computes, and in W otherwise.
        for node in nodes:
            if is_void(node) and first.issuperset(x for x in node.all_input_nodes if x in region):
                first |= effects.needed([node], region)
    # I unpacks each tuple that it computes, so that only the items that W needs are kept for W.
    # guard: results of an operator that both halves need
    first |= {x for node in first for x in node.users if is_item(x) and x in region}
    if any(
        effects.written_by(x) & (effects.reads(y) | effects.memory[y])
        for x in nodes
        if x in effects.written
        for y in nodes
        if (x in first) != (y in first)
    ):
        # W may run much later than I. If one of them changes memory that the other uses, I gets the
        # whole backward, and W is empty.
        # guard: changes in place across the halves
        first = region
    of_input = effects.in_order(first)
    of_weights = [x for x in nodes if x not in first]
    results = [x for x in joint.weight_grads if x is not None]
    used = {*results, *[x for node in of_weights for x in node.all_input_nodes]}
    live = effects.in_order(used & first)
    return sliced(of_input, [*joint.input_grads, *live]), sliced(of_weights, joint.weight_grads)


#: A function that chooses what R computes. It takes the nodes whose values the backward needs, and
#: returns the nodes to compute again, in the order of the graph.
RecomputeChoice = Callable[[Joint, Effects, Sequence[Node]], list[Node]]


def everything(joint: Joint, effects: Effects, saved: Sequence[Node]) -> list[Node]:
    """Recompute everything that the backward needs, from the input and what layers keep.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
    """
    forward = joint.forward
    # guard: random numbers in the same order
    others = [x for x in forward if is_random(x) or is_void(x)]
    # guard: what layers keep of a graph
    region = {*forward} - joint.kept
    return effects.in_order(effects.needed([*saved, *others], region))


def min_cut(joint: Joint, effects: Effects, saved: Sequence[Node]) -> list[Node]:
    """Recompute cheap operators only, from the values that take the fewest bytes.

    The kept values are a minimum cut, by bytes, between what is not recomputed (inputs, products of
    matrices, convolutions, what draws random numbers or changes memory) and what backward needs.

    Source: He and Yang, Min-cut optimal (re)materialization (dev-discuss.pytorch.org, 2022).
    """
    # PyTorch itself depends on networkx, so it is installed.
    import networkx  # type: ignore[import-untyped]

    forward = joint.forward
    region = effects.needed(saved, {*forward})
    fixed = {x for x in forward if x in joint.kept or _is_fixed(effects, x)}
    # Items of a fixed operator's tuple are fixed, too: to take one again, R would need the tuple.
    fixed |= {x for x in forward if is_item(x) and x.args[0] in fixed}
    arguments = {*joint.inputs, *joint.more}
    graph: Any = networkx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    for x in [*arguments, *region]:
        whole = isinstance(x.meta.get("val"), tuple | list)
        graph.add_edge((x, 0), (x, 1), capacity=inf if whole else joint.bytes_of(fakes_of(x)))
        if x in arguments or x in fixed:
            graph.add_edge("source", (x, 0))
        if x in region and x not in fixed:
            for y in x.all_input_nodes:
                if y in arguments or y in region:
                    graph.add_edge((y, 1), (x, 0))
    for x in saved:
        graph.add_edge((x, 1), "sink")
    _, (near, _) = networkx.minimum_cut(graph, "source", "sink")
    kept = {x for x in [*arguments, *region] if (x, 0) in near and (x, 1) not in near}
    nodes = effects.needed([x for x in saved if x not in kept], region - kept)
    return effects.in_order(nodes)


def _is_fixed(effects: Effects, node: Node) -> bool:
    """Whether a node must not be recomputed."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry or is_random(node) or is_void(node) or node in effects.written:
        return True
    # Memory that is changed in place holds another value when R runs.
    touched = effects.memory[node] | effects.reads(node)
    return any(x in effects.writers for x in touched)


CHOICES: dict[str, RecomputeChoice] = {"everything": everything, "min-cut": min_cut}
