"""A pass that cuts a backward in two: I, for the input, and W, for the weights.

::

    I   all that the gradients of the input need
    W   the rest

Values that both need are computed in I, and handed to W. Some operators compute gradients of the
input and of weights at once, and have a mask that says which: :mod:`torchgpipe.graphs.masks` makes
two of these first.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), for the halves.
"""

from __future__ import annotations

from torch.fx import Node

from torchgpipe.graphs.effects import Effects, is_item, is_void
from torchgpipe.graphs.joint import Joint
from torchgpipe.graphs.slices import Slice, crossing, sliced

__all__: list[str] = []


def backward(joint: Joint) -> Slice:
    """The whole backward (B), which returns the gradients of the input, then of the weights."""
    return sliced(_backward(joint), [*joint.input_grads, *joint.weight_grads])


def halves(joint: Joint) -> tuple[Slice, Slice]:
    """Cut the backward in two.

    Returns:
        I, which returns the gradients of the input, then what W takes from it; and W, which returns
        the gradients of the weights.
    """
    effects = Effects(joint.module.graph.nodes)
    nodes = _backward(joint)
    region = set(nodes)
    wanted = [x for x in joint.input_grads if x is not None]
    first = effects.needed(wanted, region)
    if first:
        # Operators without a result have a side effect, as a message has. Each belongs to the half
        # whose values it takes.
        for node in nodes:
            if is_void(node) and first.issuperset(x for x in node.all_input_nodes if x in region):
                first |= effects.needed([node], region)
    # An operator with several results hands on those that W needs, and not all of them.
    # guard: results of an operator that both halves need
    first |= {x for node in first for x in node.users if is_item(x) and x in region}
    if not _are_apart(effects, nodes, first):
        # guard: changes in place across the halves
        first = region
    of_input = effects.in_order(first)
    of_weights = [x for x in nodes if x not in first]
    results = [x for x in joint.weight_grads if x is not None]
    live = crossing(effects, first, of_weights, results)
    return sliced(of_input, [*joint.input_grads, *live]), sliced(of_weights, joint.weight_grads)


def _backward(joint: Joint) -> list[Node]:
    return [x for x in joint.calls if x in joint.backward]


def _are_apart(effects: Effects, nodes: list[Node], first: set[Node]) -> bool:
    """Whether no half changes memory in place that the other one has, or reads."""
    for node in nodes:
        for x in effects.written.get(node, ()):
            for other in nodes:
                if (other in first) != (node in first) and (
                    x in effects.reads(other) or x in effects.memory[other]
                ):
                    return False
    return True
