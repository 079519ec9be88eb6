"""The time and the memory of a stage, from its graphs, before a step has run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from torchgpipe._torch.attributes import storage_of
from torchgpipe.engine.computation import Forward
from torchgpipe.engine.loop import Executor
from torchgpipe.graphs.joint import tensors_of
from torchgpipe.graphs.overlap import cost
from torchgpipe.graphs.parts import Part, Parts
from torchgpipe.graphs.slices import Slice
from torchgpipe.graphs.stage import StageGraphs
from torchgpipe.graphs.traced import Traced, current_settings
from torchgpipe.schedule.costs import Costs
from torchgpipe.schedule.program import Op
from torchgpipe.skip.tracker import Parcels
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


# The memory of a stage, counted from its graphs before a step has run.
#
# Fake tensors know their sizes, and which of them share a storage. So what a cell keeps from one
# instruction to the next is known to the byte, and so is the most that a part needs while it
# runs. Memory that a kernel takes for itself, as convolutions do on a GPU, is not counted.


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


# The costs of stages, from their graphs: what schedules are judged by, before any runs.


def traced_all(executor: Executor, graphs: Sequence[StageGraphs]) -> list[Traced]:
    """Trace all stages for the first micro-batch of a step, without running any of them.

    Args:
        executor: a step that does not run.
        graphs: the graphs of each stage.

    Raises:
        ValueError: a stage cannot be a graph.
    """
    batch, _ = executor.post.values[0, 0]
    parcels = Parcels()
    found = []
    last = len(graphs) - 1
    layout = executor.step.stages.skip_layout
    settings = current_settings()
    for j, stage in enumerate(graphs):
        batch = parcels.unpacked(batch, layout.popped[j])
        run = Forward(executor, executor.plan.schedule.placement[j], Op(j, "F", 0))
        run.given = batch
        entry, _ = stage.begin(settings, executor.copies[j]).find(run, at_once=True)
        if entry is None or entry.traced is None:
            raise ValueError(
                "the costs of a stage are those of its graph, and one is eager (stage: "
                f"{j}, reasons: {stage.reasons}); measure it, or change the layer"
            )
        found.append(entry.traced)
        if j < last:
            batch = parcels.packed(_like(entry.traced, executor.step.stages.devices[j + 1]))
    return found


def costs_of(traced: Sequence[Traced]) -> Costs:
    """The costs of stages.

    Returns:
        Times as numbers of operations, and memory in bytes.
    """
    parts = [x.parts for x in traced]
    memory = [kept(x) for x in parts]

    def times(slices: Sequence[Slice]) -> list[float]:
        return [sum(map(cost, x.nodes)) for x in slices]

    return Costs(
        F=times([x.forward.slice for x in parts]),
        I=times([x.input.slice for x in parts]),
        W=times([x.weight.slice for x in parts]),
        R=times([x.again.slice for x in parts]),
        activation=[x.activation for x in memory],
        pending=[x.pending for x in memory],
        checkpoint=[x.checkpoint for x in memory],
    )


def _like(traced: Traced, device: torch.device) -> Batch:
    """Make an output of a stage, with uninitialised values, on the device of the next one."""
    tensors = []
    for node, needed in zip(traced.parts.joint.outputs, traced.form.needs_grad):
        x = node.meta["val"]
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        tensors.append(made.requires_grad_(needed))
    form = traced.form
    parts = {key: tuple([tensors[k] for k in places]) for key, places in form.parts.items()}
    return Batch.of(parts, form.structures, frozenset())
