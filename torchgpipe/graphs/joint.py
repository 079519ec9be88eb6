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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from torchgpipe.values.microbatch import Batch

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
        twins: for each node that a mask has split in two, its other half.
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
    twins: dict[Node, Node] = field(default_factory=dict)

    @property
    def forward(self) -> list[Node]:
        """The nodes of the forward, in order, without placeholders."""
        return [x for x in self.calls if x not in self.backward]

    @property
    def calls(self) -> list[Node]:
        """All nodes that compute something, in order."""
        return [x for x in self.module.graph.nodes if x.op not in ("placeholder", "output")]

    @property
    def results(self) -> list[Node]:
        """All nodes whose values are results of the graph, each once."""
        found = [*self.outputs, *self.input_grads, *self.weight_grads]
        return [*dict.fromkeys(x for x in found if x is not None)]

    def like(self, batch: Batch, more: Sequence[Tensor]) -> tuple[Batch, list[Tensor]]:
        """A micro-batch, and arguments of the loss, of the same kinds, without data."""

        def without_data(nodes: Sequence[Node], tensors: Iterable[Tensor]) -> list[Tensor]:
            return [
                node.meta["val"].detach().requires_grad_(x.requires_grad)
                for node, x in zip(nodes, tensors)
            ]

        return batch.replace(without_data(self.inputs, batch)), without_data(self.more, more)

    def replace(self, old: Node, new: Node) -> None:
        """Replace a node by another one in all its uses."""
        old.replace_all_uses_with(new)

        def other(nodes: Sequence[Node | None]) -> list[Any]:
            return [new if x is old else x for x in nodes]

        self.outputs = other(self.outputs)
        self.input_grads = other(self.input_grads)
        self.weight_grads = other(self.weight_grads)


def tensors_of(node: Node) -> list[Tensor]:
    """The tensors that a node computes, as fake tensors, which have no data."""
    value = node.meta.get("val")
    found = value if isinstance(value, tuple | list) else [value]
    return [x for x in found if isinstance(x, Tensor)]
