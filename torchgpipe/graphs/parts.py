"""The parts of a stage's graph: what each instruction of a schedule computes.

::

    F   state, input             → outputs, saved          with a backward
    F   state, input             → outputs, kept           under checkpointing
    R   state, kept              → saved                   the forward again
    B   state, saved, tangents   → gradients of the input, and of the weights
    I   state, saved, tangents   → gradients of the input, live
    W   state, live, and what is left of saved and tangents → gradients of the weights

Each is made when it is needed first: a schedule without W never asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchgpipe._torch.attributes import VIEWS, schema_of, storage_of
from torchgpipe.graphs.gate import gate
from torchgpipe.graphs.joint import Effects, Joint, fakes_of, has_statistics, is_random, is_void
from torchgpipe.graphs.slices import (
    RecomputeChoice,
    Slice,
    SliceFunction,
    backward,
    everything,
    function_of,
    graph_of,
    halves,
    sliced,
    split_masks,
    tidy,
    without,
)

__all__: list[str] = []


aten = torch.ops.aten

#: Operators, besides ``VIEWS``, that need an argument to have the strides that the trace assumed.
RELYING = {aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default}
RELYING |= {aten.as_strided_.default, aten.as_strided_scatter.default}
#: Operators whose results have the strides that the trace assumed, on every device.
CERTAIN = {aten.new_empty_strided.default, aten.empty_strided.default, aten.mm.default}
CERTAIN |= {aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
#: Operators, besides elementwise ones, whose results have the strides that the trace assumed if all
#: of their arguments have.
FOLLOWING = {aten.sum.dim_IntList}


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with these strides: itself, or a copy."""
    return tensor if tensor.stride() == strides else copy_with_strides(tensor, strides)


def copy_with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    copy = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # The graph relies on conjugate and negative bits, so the copy gets those of the tensor.
    copy = copy.conj() if tensor.is_conj() else copy
    return (copy._neg_view() if tensor.is_neg() else copy).copy_(tensor)


def fix_strides(joint: Joint) -> Joint:
    """Insert copies, so that results do not depend on the strides that kernels return.

    A kernel may return other strides than its fake tensor has, as those of losses do. Most
    operators take any strides. A view takes only some, and the trace lacks the copies that it would
    need (by ``contiguous``, or within ``reshape``), since the fake tensor needed none.
    """
    graph = joint.module.graph
    effects = Effects(graph.nodes)
    # Placeholders have the traced strides, since an input of other strides gets another graph.
    certain = {x for x in graph.nodes if x.op != "call_function"}

    def fix(x: Node) -> None:
        """Copy a tensor where its memory is created, so that all views have the traced strides."""
        memory = effects.memory[x]
        shared = [y for y in effects.position if memory & effects.memory[y]]
        shared = [y for y in shared if isinstance(y.meta["val"], Tensor)]
        origin = shared[0]
        with graph.inserting_after(origin):
            copy = graph.call_function(laid_out, (origin, origin.meta["val"].stride()))
        copy.meta = {**origin.meta}
        joint.replace(origin, copy)
        copy.update_arg(0, origin)
        effects.memory[copy] = effects.memory[origin]
        certain.update([*shared, copy])
        if origin in joint.backward:
            joint.backward.add(copy)

    for node in joint.calls:
        late = node in joint.backward
        for x in [x for x in _relying(node) if x not in certain]:
            changes = effects.changes(x)
            if node.target in VIEWS and all((y in joint.backward) != late for y in changes):
                # guard: views of other strides
                node.target, node.args = aten.reshape.default, node.args[:2]
            elif x not in certain:
                # guard: strides of arguments
                fix(x)
        if _is_certain(effects, node, certain):
            certain.add(node)
    # The next stage may take views of the outputs that only the traced strides allow.
    for x in [x for x in joint.outputs if x not in certain]:
        if x not in certain:
            # guard: strides of outputs
            fix(x)
    graph.output_node().args = (joint.results,)
    return joint


def _relying(node: Node) -> list[Node]:
    """The arguments of an operator whose strides matter."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    if node.target in VIEWS or node.target in RELYING or "attention" in schema.name:
        return node.all_input_nodes
    # Operators of other libraries than aten may depend on the strides of any argument.
    return [] if schema.name.startswith("aten::") else node.all_input_nodes


def _is_certain(effects: Effects, node: Node, certain: Collection[Node]) -> bool:
    """Whether a node has the strides of its fake tensor."""
    if node.target in CERTAIN or not any(x.dim() for x in fakes_of(node)):
        return True
    if node.target in FOLLOWING or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return all(x in certain for x in node.all_input_nodes)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node.target is aten.reshape.default:
        return False
    memory = effects.memory[node]
    return source in certain and bool(memory) and memory <= effects.memory[source]


#: For each role, such as ``state`` or ``saved``, the arguments of a part in that role.
ByRole = Mapping[str, Sequence[Any]]
Maker = Callable[[Joint, Slice], SliceFunction]
#: For each argument of a part, by the name of its node: its role, and its index in that role.
Roles = Mapping[str, tuple[str, int]]


@dataclass(frozen=True, eq=False)
class Part:
    """A slice as a function, and where its arguments come from.

    Args:
        slice: the nodes.
        function: the function.
        sources: for each argument its role, and its index among the arguments of that role.
        owner: the graph that the nodes are from, and what these do besides returning values.
        is_random: whether it draws random numbers.
        interleaved_with: for other parts, the function that runs both interleaved; None where that
            is no use.
    """

    slice: Slice
    function: SliceFunction
    sources: list[tuple[str, int]]
    owner: BackwardParts
    is_random: bool
    interleaved_with: WeakKeyDictionary[Part, Any] = field(default_factory=WeakKeyDictionary)

    def arguments(self, by_role: ByRole) -> list[Any]:
        """The list of arguments, which the function empties."""
        return [by_role[role][k] for role, k in self.sources]

    def reserve(self, by_role: ByRole, later: str) -> list[Any]:
        """The list of arguments, with None for those of role ``later`` until :meth:`add`."""
        return self.arguments({**by_role, later: [None] * len(self.sources)})

    def add(self, values: list[Any], later: str, late_values: Sequence[Any]) -> None:
        """Put the values of role ``later`` into a list that :meth:`reserve` has made."""
        for index, (role, k) in enumerate(self.sources):
            if role == later:
                values[index] = late_values[k]


class BackwardParts:
    """The backward of a stage, for gradients of some of its outputs, or of all.

    Args:
        joint: forward and backward.
        make: turns a slice into a function.
        roles: for each argument of the backward, by name, its role and index.
    """

    def __init__(self, joint: Joint, make: Maker, roles: Roles) -> None:
        self.joint, self._make, self._later = joint, make, roles
        self.effects = Effects(joint.module.graph.nodes)

    @cached_property
    def backward(self) -> Part:
        """B: returns the gradients of the input, then of the weights."""
        return self._part(backward(self.joint), self._later)

    @property
    def input(self) -> Part:
        """I: returns the gradients of the input, then what W takes from it."""
        return self._halves[0]

    @property
    def weight(self) -> Part:
        """W: returns the gradients of the weights."""
        return self._halves[1]

    @cached_property
    def _halves(self) -> tuple[Part, Part]:
        joint = split_masks(self.joint)
        first, last = halves(joint)
        live = first.outputs[len(joint.input_grads) :]
        roles = {x.name: ("live", k) for k, x in enumerate(live) if x is not None}
        split = BackwardParts(joint, self._make, self._later)
        return split._part(first, self._later), split._part(last, {**self._later, **roles})

    def without(self, missing: Collection[int]) -> BackwardParts:
        """The backward in which outputs of these indices have no gradient."""
        return BackwardParts(without(self.joint, missing), self._make, self._later)

    def _part(self, part: Slice, roles: Roles) -> Part:
        sources = [roles[x.name] for x in part.inputs]
        return Part(
            part, self._make(self.joint, part), sources, self, any(map(is_random, part.nodes))
        )


class Parts(BackwardParts):
    """The parts of one stage, for one kind of input.

    Args:
        joint: forward and backward.
        make: makes a function of a slice.
        recompute: chooses what is computed again under checkpointing.
    """

    def __init__(
        self, joint: Joint, make: Maker = function_of, recompute: RecomputeChoice = everything
    ) -> None:
        joint = fix_strides(tidy(joint))
        self._recompute = recompute
        self._roles = {
            x.name: (role, k)
            for role, nodes in (
                ("state", joint.state),
                ("input", joint.inputs),
                ("more", joint.more),
                ("tangent", joint.tangents),
            )
            for k, x in enumerate(nodes)
            if x is not None
        }
        roles = {x: self._roles.get(x.name, ("saved", 0)) for x in backward(joint).inputs}
        #: The parameters and buffers that the backward takes, as indices into ``joint.state``.
        self.state_of_backward = [k for role, k in roles.values() if role == "state"]
        #: The nodes whose values the forward keeps for the backward. Some may be inputs.
        self.saved = [x for x, (role, _) in roles.items() if role not in ("state", "tangent")]
        saved = {x.name: ("saved", k) for k, x in enumerate(self.saved)}
        super().__init__(joint, make, self._roles | saved)
        memory = self.effects.memory
        forward = {x for node in joint.forward for x in self.effects.written_by(node)}
        #: The parameters and buffers that the forward changes, as indices into ``joint.state``.
        self.changed = [k for k, x in enumerate(joint.state) if memory[x] & forward]
        #: The inputs, and the arguments of the loss, that the forward changes in place. A cell
        #: passes clones of them, since the stage before, or R, may need the originals.
        self.changed_inputs = {x for x in (*joint.inputs, *joint.more) if memory[x] & forward}
        ends = {x for node in [*joint.inputs, *joint.outputs] for x in memory[node]}
        #: The saved values that share memory with inputs or outputs, as indices into ``saved``.
        #: Another stage might change that memory before the backward, which then raises an error.
        self.exposed = [k for k, x in enumerate(self.saved) if memory[x] & ends]

    def bytes_of(self, nodes: Iterable[Node]) -> int:
        """The memory of some values; parameters, buffers and their views are not among it."""
        state = {storage_of(x) for node in self.joint.state for x in fakes_of(node)}
        fakes = [x for node in nodes for x in fakes_of(node)]
        return self.joint.bytes_of(x for x in fakes if storage_of(x) not in state)

    @cached_property
    def forward(self) -> Part:
        """F: returns the outputs, then what is saved."""
        return self._part(
            sliced(self.joint.forward, [*self.joint.outputs, *self.saved]), self._roles
        )

    @cached_property
    def first(self) -> Part:
        """F under checkpointing: returns the outputs, then the values of F that R takes."""
        results = [*self.joint.outputs, *self._computed]
        nodes = self._needed([*results, *self.effects.written])
        return self._part(sliced(nodes, results), self._roles)

    @cached_property
    def again(self) -> Part:
        """R: returns what is saved."""
        roles = {x.name: ("kept", k) for k, x in enumerate(self._computed)}
        return self._part(self._again, {**self._roles, **roles})

    @property
    def kept(self) -> list[Node]:
        """The nodes whose values a cell keeps from F until R: arguments and results of F."""
        roles = self._roles
        return [x for x in self._again.inputs if roles.get(x.name, ("",))[0] != "state"]

    @property
    def _computed(self) -> list[Node]:
        return [x for x in self._again.inputs if x.name not in self._roles]

    @cached_property
    def changed_again(self) -> list[int]:
        """The parameters and buffers that R changes, so that it needs copies."""
        again = {*self.again.slice.inputs}
        return [k for k in self.changed if self.joint.state[k] in again]

    @cached_property
    def _again(self) -> Slice:
        return sliced(self._recompute(self.joint, self.effects, self.saved), self.saved)

    def _needed(self, results: Sequence[Node]) -> list[Node]:
        """The nodes of the forward that results need, and those with side effects, in order."""
        forward = self.joint.forward
        # guard: random numbers of a first run
        others = [x for x in forward if is_random(x) or is_void(x)]
        return self.effects.in_order(self.effects.needed([*results, *others], {*forward}))


def slice_compiler(backend: str | Callable[..., Any]) -> Callable[[Joint, Slice], SliceFunction]:
    """Make a compiler, which turns a slice of a graph into a function.

    It may compute in another order, and draw other random numbers, than the operators one by one.

    Args:
        backend: as for :func:`torch.compile`.
    """

    def make(joint: Joint, part: Slice) -> SliceFunction:
        if not part.nodes:
            return function_of(joint, part)
        # fullgraph=True is left out: PyTorch would count compiled frames of all threads together,
        # and fail if the count is wrong. A graph of operators has no graph break anyway.
        module = GraphModule(joint.module, graph_of(part))
        function = torch.compile(module, backend=backend, dynamic=False)
        effects = Effects(joint.module.graph.nodes)
        # PyTorch's norms leave the version counter of running statistics as it is, and compiled
        # code increases it. Then the backward of an eager cell would refuse the statistics that it
        # has saved. So a compiled part is given aliases, which have version counters of their own.
        statistics = [
            k
            for k, node in enumerate(part.inputs)
            if (writers := effects.changes(node)) and all(map(has_statistics, writers))
        ]
        is_compiled = False

        def run(values: list[Any]) -> Sequence[Any]:
            nonlocal is_compiled
            for k in statistics:
                values[k] = values[k].data
            arguments = tuple(values)
            values.clear()
            # The first call compiles, so no other thread may compute meanwhile. A later call runs
            # beside other threads, though it compiles again if a global setting has changed.
            with nullcontext() if is_compiled else gate.tracing():
                results: Sequence[Any] = function(*arguments)
            is_compiled = True
            return results

        return run

    return make
