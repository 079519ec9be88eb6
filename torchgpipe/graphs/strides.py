"""A pass for strides: graphs must compute the same if kernels return other strides than traced.

A kernel may return other strides than its fake tensor has, as those of losses do. Most operators
take any strides. A view takes only some, and the trace lacks the copies that it would need (by
``contiguous``, or within ``reshape``), since the fake tensor needed none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from torchgpipe._torch.graphs import VIEWS, schema_of
from torchgpipe.graphs.effects import Effects
from torchgpipe.graphs.joint import Joint, tensors_of

__all__: list[str] = []

aten = torch.ops.aten

#: Operators, besides views by shape, that compute something else, or refuse, with other strides.
RELYING = {aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default}
RELYING |= {aten.as_strided_.default, aten.as_strided_scatter.default}
#: Operators whose strides are the same for fake tensors and others.
CERTAIN = {aten.new_empty_strided.default, aten.empty_strided.default, aten.mm.default}
CERTAIN |= {aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
#: Operators, besides elementwise ones, whose strides follow from those of their arguments.
FOLLOWING = {aten.sum.dim_IntList}


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with these strides: itself, or a copy."""
    return tensor if tensor.stride() == strides else copied(tensor, strides)


def copied(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(tensor)


def settle_strides(joint: Joint) -> Joint:
    """Insert copies, so that results do not depend on the strides that kernels return."""
    graph = joint.module.graph
    effects = Effects(graph.nodes)
    # Placeholders come with the strides of the trace.
    certain = {x for x in graph.nodes if x.op != "call_function"}

    def lay_out(x: Node, late: bool) -> Node:
        found = graph.call_function(laid_out, (x, tensors_of(x)[0].stride()))
        found.meta = {**x.meta}
        effects.memory[found] = effects.memory[x]
        certain.add(found)
        if late:
            joint.backward.add(found)
        return found

    def lay_out_origin(x: Node) -> None:
        """Copy a tensor where its memory is created, so that all views have the traced strides."""
        memory = effects.memory[x]
        shared = [y for y in effects.position if memory & effects.memory[y]]
        shared = [y for y in shared if isinstance(y.meta["val"], Tensor)]
        origin = shared[0]
        with graph.inserting_after(origin):
            found = lay_out(origin, origin in joint.backward)
        joint.replace(origin, found)
        found.update_arg(0, origin)
        certain.update(shared)

    for node in joint.calls:
        late = node in joint.backward
        for x in _relying(node):
            if x in certain:
                continue
            if any((writer in joint.backward) == late for writer in effects.changes(x)):
                # A change through a copy would be lost.
                # guard: strides of what changes in place
                lay_out_origin(x)
            elif node.target in VIEWS:
                # guard: views of other strides
                node.target, node.args = aten.reshape.default, node.args[:2]
            else:
                with graph.inserting_before(node):
                    # guard: strides of arguments
                    node.replace_input_with(x, lay_out(x, late))
        if _is_certain(effects, node, certain):
            certain.add(node)
    # The next stage may rely on the strides of outputs, too.
    forward = joint.forward
    for x in [*dict.fromkeys(joint.outputs)]:
        if x not in certain:
            with graph.inserting_after(forward[-1]):
                # guard: strides of outputs
                found = lay_out(x, late=False)
            joint.outputs = [found if y is x else y for y in joint.outputs]
    graph.output_node().args = (joint.results,)
    return joint


def _relying(node: Node) -> list[Node]:
    """The arguments of an operator whose strides matter."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    if node.target in VIEWS or node.target in RELYING or "attention" in schema.name:
        return node.all_input_nodes
    # Operators of other libraries may rely on all strides.
    return [] if schema.name.startswith("aten::") else node.all_input_nodes


def _is_certain(effects: Effects, node: Node, certain: Collection[Node]) -> bool:
    """Whether a node has the strides of its fake tensor."""
    if node.target in CERTAIN or not any(x.dim() for x in tensors_of(node)):
        return True
    if node.target in FOLLOWING or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return all(x in certain for x in node.all_input_nodes)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node.target is aten.reshape.default:
        return False
    memory = effects.memory[node]
    return source in certain and bool(memory) and memory <= effects.memory[source]
