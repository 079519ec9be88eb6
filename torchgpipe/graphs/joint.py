"""Joint graphs: the forward and the backward of a stage, in one graph of PyTorch's basic operators.

::

    state, input, loss's arguments ──→ forward ──→ outputs
                                          │ saved
                                          ↓
    gradients of the outputs ───────→ backward ──→ gradients of the input, and of the weights

All passes look at one such graph, and choose nodes from it: F is the forward, I is what the
gradients of the input need of the backward, and so on. So the parts of a stage fit together by
construction.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchgpipe._torch.attributes import schema_of, storage_of
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


@dataclass
class Joint:
    """A graph, and the roles of its nodes.

    Args:
        module: the graph, and the constants in it.
        state: the placeholders of parameters and buffers.
        inputs: the placeholders of the tensors that come from the stage before.
        more: the placeholders of the further arguments of the loss.
        outputs: the nodes that compute the outputs.
        tangents: the placeholders of the gradients of the outputs; None where none is wanted.
        input_grads: the gradient of each input; None where there is none.
        weight_grads: the gradient of each weight; None where there is none.
        backward: the nodes of the backward.
        kept: the nodes of the forward that layers keep for a recomputation.
    """

    module: GraphModule
    state: list[Node]
    inputs: list[Node]
    more: list[Node]
    outputs: list[Node]
    tangents: list[Node | None] = field(default_factory=list)
    input_grads: list[Node | None] = field(default_factory=list)
    weight_grads: list[Node | None] = field(default_factory=list)
    backward: set[Node] = field(default_factory=set)
    kept: set[Node] = field(default_factory=set)

    @property
    def forward(self) -> list[Node]:
        """The nodes of the forward, in order, without placeholders."""
        return [x for x in self.calls if x not in self.backward]

    @property
    def late(self) -> list[Node]:
        """The nodes of the backward, in order."""
        return [x for x in self.calls if x in self.backward]

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """The memory of some fake tensors, each storage once, in bytes.

        An input may be a view of all micro-batches, whose memory is the caller's.
        """
        sizes = {storage_of(x): x.untyped_storage().nbytes() for x in tensors}
        for node in [*self.inputs, *self.more]:
            for x in fakes_of(node):
                if (storage := storage_of(x)) in sizes:
                    sizes[storage] = min(x.nbytes, sizes[storage])
        return sum(sizes.values())

    @property
    def calls(self) -> list[Node]:
        """All nodes that compute something, in order."""
        return [x for x in self.module.graph.nodes if x.op not in ("placeholder", "output")]

    @property
    def results(self) -> list[Node]:
        """All nodes whose values are results of the graph, each once."""
        nodes = [*self.outputs, *self.input_grads, *self.weight_grads]
        return [*dict.fromkeys(x for x in nodes if x is not None)]

    def copied(self) -> Joint:
        """Copy the graph; nodes keep their names."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.graph_copy(self.module.graph, copies)
        roles = [
            type(nodes)([None if x is None else copies[x] for x in nodes])
            for nodes in (getattr(self, role.name) for role in fields(self)[1:])
        ]
        graph.output([copies[x] for x in self.results])
        return Joint(GraphModule(self.module, graph), *roles)

    def replace(self, old: Node, new: Node) -> None:
        """Replace a node by another one in all its uses."""
        old.replace_all_uses_with(new)

        def other(nodes: Sequence[Node | None]) -> list[Any]:
            return [new if x is old else x for x in nodes]

        self.outputs = other(self.outputs)
        self.input_grads = other(self.input_grads)
        self.weight_grads = other(self.weight_grads)
        self.kept = {*other([*self.kept])}


def fakes_of(node: Node) -> list[Tensor]:
    """The tensors that a node computes, as fake tensors, which have no data."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [x for x in values if isinstance(x, Tensor)]


#: Names of the arguments for running statistics. In training a norm's operator writes to them,
#: though its schema does not say so.
STATISTICS = ("running_mean", "running_var")

#: A set of storages, that is, of memory that a tensor and its views share. Each is named by the
#: number that :func:`storage_of` returns.
Storages = frozenset[int]


class Effects:
    """The memory that each node of a graph returns, reads and writes.

    An in-place operator changes memory that other nodes read. A pass that takes nodes out of a
    graph must take it, too, and must keep their order.

    Args:
        nodes: all nodes of the graph, in order.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.position = {node: k for k, node in enumerate(nodes)}
        #: For each node, the storages of the tensors that it returns.
        self.memory = {node: frozenset(map(storage_of, fakes_of(node))) for node in self.position}
        #: For each storage, the nodes that write to it, in the order of the graph.
        self.writers: dict[int, list[Node]] = {}
        self.written: dict[Node, Storages] = {}
        for node in self.position:
            written = frozenset(
                x for argument in _written(node) for x in self.memory.get(argument, ())
            )
            if written:
                self.written[node] = written
            for x in written:
                self.writers.setdefault(x, []).append(node)

    def reads(self, node: Node) -> Storages:
        """The memory that a node reads."""
        unread = _statistics(node) if _is_backward(node) else []
        read = [self.memory[x] for x in node.all_input_nodes if x not in unread]
        return frozenset[int]().union(*read)

    def written_by(self, node: Node) -> Storages:
        """The memory that a node changes."""
        return self.written.get(node, frozenset())

    def touched_by(self, node: Node) -> Storages:
        """The memory that a node reads or changes."""
        return self.reads(node) | self.written_by(node)

    def changes(self, node: Node) -> list[Node]:
        """The nodes that change the memory of a node."""
        return [writer for x in self.memory[node] for writer in self.writers.get(x, ())]

    def before(self, node: Node) -> list[Node]:
        """The nodes that change memory before a node reads it."""
        if not self.writers:
            return []
        position = self.position[node]
        return [
            writer
            for x in self.reads(node)
            for writer in self.writers.get(x, ())
            if self.position[writer] < position
        ]

    def between(self, source: Node, node: Node) -> bool:
        """Whether the memory of ``source`` is changed in place between ``source`` and ``node``."""
        first, last = self.position[source], self.position[node]
        return any(first < self.position[writer] < last for writer in self.changes(source))

    def needed(self, results: Iterable[Node], region: Collection[Node]) -> set[Node]:
        """Find the nodes of a region that results depend on; values from outside of it are given.

        Results are read after the whole region, so nodes that change their memory count, too.
        """
        reached: set[Node] = set()
        # guard: changes in place after a result
        stack = [x for result in results for x in (result, *self.changes(result)) if x in region]
        while stack:
            node = stack.pop()
            if node in reached:
                continue
            reached.add(node)
            # guard: changes in place before a node
            around = [*node.all_input_nodes, *self.before(node)]
            stack += [x for x in around if x in region and x not in reached]
        return reached

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """Some nodes in the order of the graph."""
        return sorted(nodes, key=self.position.__getitem__)


def has_statistics(node: Node) -> bool:
    """Whether a node is a norm that takes running statistics."""
    return any(name in STATISTICS for name, _ in operator_arguments(node))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers; attention with a dropout of 0 does not."""
    chances = [value for name, value in operator_arguments(node) if name in ("dropout_p", "p")]
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    without = bool(chances) and all(x == 0 for x in chances)
    return torch.Tag.nondeterministic_seeded in tags and not without


def is_void(node: Node) -> bool:
    """Whether a node returns nothing, so that it is there for a side effect."""
    schema = schema_of(node.target)
    return schema is not None and not schema.returns


def is_view(node: Node) -> bool:
    """Whether a node returns a view of its first argument, and does nothing else."""
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    return schema.returns[0].alias_info is not None


def operator_arguments(node: Node) -> list[tuple[str, Any]]:
    """The arguments of an operator by name, without those that are at their default."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    named = [(argument.name, value) for argument, value in zip(schema.arguments, node.args)]
    return [*named, *node.kwargs.items()]


def _written(node: Node) -> list[Node]:
    """The arguments that an operator writes to."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    infos = {x.name: x.alias_info for x in schema.arguments}
    declared = [x for name, x in operator_arguments(node) if infos[name] and infos[name].is_write]
    written = [x for x in leaves_of(declared) if isinstance(x, Node)]
    return written if _is_backward(node) else [*written, *_statistics(node)]


def _statistics(node: Node) -> list[Node]:
    """The running statistics that a norm takes where it uses those of the batch.

    Its forward writes them, and its backward does not read them.
    """
    named = dict(operator_arguments(node))
    trains = named.get("training", named.get("train", named.get("use_input_stats", True)))
    return [named[name] for name in STATISTICS if trains and isinstance(named.get(name), Node)]


def _is_backward(node: Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and bool(schema.name.endswith("backward"))


def is_item(node: Node) -> bool:
    """Whether a node takes one of several values that an operator returns."""
    return node.target is operator.getitem
