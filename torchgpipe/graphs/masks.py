"""A pass for operators with a mask: each becomes two, for the input and for the weights.

``convolution_backward`` computes the gradients of the input, the weight and the bias at once,
unless its mask says otherwise. Cut as it is, all of it would be in I, and W would be empty. Two of
it, with masks that complete each other, do the same arithmetic.

That pays where the gradients of the weights take much arithmetic. In a norm they take little, and
W would have to keep the norm's input for them. So the arithmetic decides: operators whose
operations PyTorch counts (:mod:`torch.utils.flop_counter`) are convolutions and products of
matrices.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from torchgpipe._torch.graphs import schema_of
from torchgpipe.graphs.effects import Effects, is_item
from torchgpipe.graphs.joint import Joint

__all__: list[str] = []


def split_masks(joint: Joint) -> Joint:
    """Make two nodes of each operator that computes gradients of both kinds by a mask."""
    effects = Effects(joint.module.graph.nodes)
    first = effects.needed([x for x in joint.input_grads if x is not None], joint.backward)
    for node in joint.calls:
        place = _mask_of(node)
        if place is None or node not in first or node not in joint.backward:
            continue
        items = [*node.users]
        early = [x for x in items if x in first]
        late = [x for x in items if x not in first]
        if late and early and all(map(is_item, items)):
            _split(joint, node, place, early, late)
    joint.module.graph.lint()
    return joint


def as_one(node: Node, whole: Node, twin: Node) -> None:
    """Let one copied node compute the gradients of its twin, too.

    Where I and W are one B, one operator takes less time than two.

    Args:
        node: the copy of ``whole`` in another graph.
        whole: the node.
        twin: its twin.
    """
    place = _mask_of(whole)
    assert place is not None
    masks: Any = whole.args[place], twin.args[place]
    node.update_arg(place, [a or b for a, b in zip(*masks)])


def _mask_of(node: Node) -> int | None:
    """The index of the mask among the arguments of an operator with much arithmetic; else None."""
    schema = schema_of(node.target)
    packet: Any = getattr(node.target, "overloadpacket", None)
    if schema is None or packet not in flop_registry:
        return None
    names = [x.name for x in schema.arguments]
    place = names.index("output_mask") if "output_mask" in names else len(node.args)
    return place if place < len(node.args) else None


def _split(joint: Joint, node: Node, place: int, early: list[Node], late: list[Node]) -> None:
    mask: Any = node.args[place]
    graph = joint.module.graph
    with graph.inserting_after(node):
        other = graph.node_copy(node)
    joint.backward.add(other)
    joint.twins[other] = node
    for one, items in ((node, early), (other, late)):
        kept = {x.args[1] for x in items}
        one.update_arg(place, [needed and k in kept for k, needed in enumerate(mask)])
        one.meta = {
            **one.meta,
            "val": tuple([x if k in kept else None for k, x in enumerate(one.meta["val"])]),
        }
    for item in late:
        item.update_arg(0, other)
