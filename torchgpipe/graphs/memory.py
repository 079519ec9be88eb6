"""The memory of a stage, counted from its graphs before a step has run.

Fake tensors know their sizes, and which of them share a storage. So what a cell keeps from one
instruction to the next is known to the byte, and so is the most that a part needs while it runs.
Memory that a kernel takes for itself, as convolutions do on a GPU, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.fx import Node

from torchgpipe._torch.graphs import storage_of
from torchgpipe.graphs.joint import tensors_of
from torchgpipe.graphs.parts import Part, Parts

__all__: list[str] = []


class CellMemory(NamedTuple):
    """The memory that one cell keeps, in bytes.

    Args:
        activation: from F, or from R, until B or I.
        pending: from I until W.
        checkpoint: from F until R.
    """

    activation: int
    pending: int
    checkpoint: int


def kept(parts: Parts) -> CellMemory:
    """The memory that a cell keeps; parameters and buffers are not among it."""
    state = {x for node in parts.joint.state for x in _storages([node])}
    late = parts.weight.slice.inputs
    changed = [parts.joint.state[k] for k in parts.changed_again]

    def count(nodes: Iterable[Node]) -> int:
        return sum(size for x, size in _storages(nodes).items() if x not in state)

    return CellMemory(
        count(parts.saved), count(late), count(parts.kept) + sum(_storages(changed).values())
    )


def peak(parts: Parts, part: Part, held: Sequence[Node] = ()) -> int:
    """The most memory that a part has at a time, in bytes, its arguments and results included.

    Args:
        parts: the parts of the stage.
        part: the part.
        held: the nodes whose values stay in memory meanwhile, as those that W needs while I runs.
    """
    state = {x for node in parts.joint.state for x in _storages([node])}
    last: dict[int, int] = {}
    for k, node in enumerate(part.slice.nodes):
        for x in _storages([node, *node.all_input_nodes]):
            last[x] = k
    for x in _storages([*held, *[x for x in part.slice.outputs if x is not None]]):
        last[x] = len(part.slice.nodes)
    own = {*part.slice.nodes}
    before = [*part.slice.inputs, *[x for x in held if x not in own]]
    alive = {x: size for x, size in _storages(before).items() if x not in state}
    most = sum(alive.values())
    for k, node in enumerate(part.slice.nodes):
        alive |= {x: size for x, size in _storages([node]).items() if x not in state}
        most = max(most, sum(alive.values()))
        for x in [x for x in alive if last.get(x, -1) <= k]:
            del alive[x]
    return most


def _storages(nodes: Iterable[Node]) -> dict[int, int]:
    """The storages of some nodes, with their sizes."""
    return {storage_of(x): x.untyped_storage().nbytes() for node in nodes for x in tensors_of(node)}
