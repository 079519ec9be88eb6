"""The costs of stages, from their graphs: what schedules are judged by, before any runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchgpipe.executor.computation import Forward
from torchgpipe.executor.executor import Executor
from torchgpipe.graphs.memory import kept
from torchgpipe.graphs.overlap import cost
from torchgpipe.graphs.slices import Slice
from torchgpipe.graphs.stage import StageGraphs
from torchgpipe.graphs.surroundings import current_settings
from torchgpipe.graphs.traced import Traced
from torchgpipe.schedule.costs import Costs
from torchgpipe.schedule.program import Op
from torchgpipe.skip.parcels import Parcels
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


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
