"""Costs of a partition: the times of its cells, and their memory at each moment.

The layers of a partition are gone through in the order in which they run, forward and backward, so
that the memory of a cell is known where it is highest, and not only where it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torchgpipe.planner.backward import SUMMED, Peak
from torchgpipe.planner.blocks import Blocks
from torchgpipe.planner.layers import Layer
from torchgpipe.planner.skips import End
from torchgpipe.skip.namespace import Skip

__all__ = ["Stage", "stage_of", "ways"]


@dataclass(frozen=True)
class Stage:
    """The costs of one partition for micro-batches of some rows, in milliseconds and bytes.

    Args:
        F, I, W, R: the time of each kind.
        input: memory of its input, as it arrives.
        output: memory of its output.
        kept: memory that a cell keeps from F, or from R, until its backward.
        checkpoint: memory that a cell keeps from F until R.
        pending: memory that a cell keeps from I until W.
        forward: the most memory during F, above that before, its input aside.
        forward_again: likewise of an F whose cell is computed again.
        again: likewise of R.
        whole: the most memory of the first B, of the second, and of a later one, above that before,
            with the gradient of the output.
        half: likewise of I.
        weight: likewise of the first W, of the second, and of a later one, above that before.
        adding: the most memory of the first micro-batch of autograd's backward, of the second, and
            of a later one, likewise.
        weights: the memory of the gradients of its weights.
        parameters: the memory of its parameters and buffers.
        keeps_input: whether cells keep the input.
        keeps_output: whether cells keep the output.
        stashed: the skips that it stashes for other partitions.
        popped: the skips that others have stashed for it. What cells keep, as above, is without
            them.
        sent: memory of the gradients that go to other partitions.
    """

    F: float
    I: float  # noqa: E741  # The field's name for it.
    W: float
    R: float
    input: float
    output: float
    kept: float
    checkpoint: float
    pending: float
    forward: float
    forward_again: float
    again: float
    whole: Sequence[float]
    half: float
    weight: Sequence[float]
    adding: Sequence[float]
    weights: float
    parameters: float
    keeps_input: bool
    keeps_output: bool
    stashed: Mapping[Skip, End] = field(default_factory=dict)
    popped: Mapping[Skip, End] = field(default_factory=dict)
    sent: float = 0.0


def ways(stages: Sequence[Stage]) -> dict[tuple[int, int], list[Skip]]:
    """The skips between each pair of stages that some lead from and to."""
    source = {skip: j for j, stage in enumerate(stages) for skip in stage.stashed}
    found: dict[tuple[int, int], list[Skip]] = {}
    for k, stage in enumerate(stages):
        for skip in stage.popped:
            found.setdefault((source[skip], k), []).append(skip)
    return dict(sorted(found.items()))


def stage_of(layers: Sequence[Layer], rows: float, before: Layer | None) -> Stage:
    """Put layers together to a partition.

    Args:
        layers: its layers.
        rows: the rows of a micro-batch.
        before: the layer in front of the first one; None if the partition is the first, whose input
            is the caller's and takes no memory of a cell.
    """
    arriving = before.memory.output.at(rows) if before is not None else 0.0
    needs = before is not None and before.memory.depends
    inputs = [x.input.at(rows) for x in layers]
    memory = [x.memory for x in layers]
    blocks = Blocks(memory, rows, arriving)
    kept, output = blocks.kept, blocks.sizes[-1]
    trainable = [float(x.trainable) for x in memory]
    small = [float(x.small) for x in memory]

    def whole(k: int) -> float:
        peaks = [_at(x.backward.whole[k], rows) for x in memory]
        return _backward(blocks, peaks, small if k else trainable)

    def adding(k: int) -> float:
        each = [x.backward.adding[k].at(rows) for x in memory]
        stay = [0.0] * len(memory) if k else trainable
        return _backward(blocks, [Peak(x, x) for x in each], stay, is_held=False)

    wholes = [whole(k) for k in range(SUMMED)]
    pending = sum(x.backward.pending.at(rows) for x in memory)
    pending += sum(x.size for x in blocks.pending)
    half = _half(layers, blocks, rows)
    # The gradients of all weights are there before they are added to the sums. The second W makes
    # the first sum: a new tensor, since a gradient that came alone may be shared by others.
    each = zip(accumulate(trainable, initial=0.0), memory)
    weight = max(x + y.backward.weight.at(rows) for x, y in each)
    at_once = max((x.largest for x in memory if x.small < x.trainable), default=0)
    weights = [weight, max(weight, sum(trainable) + at_once), weight]
    if not needs:
        # The input needs no gradient. So I only keeps the gradient of the output for W, which does
        # the whole backward, and begins with that gradient in memory.
        given = output + sum(x.gradient for x in blocks.stashed.values())
        pending, half, weights = kept + given, given, [x - given for x in wholes]
    return Stage(
        F=sum(x.forward.at(rows) for x in layers),
        I=sum(inputs) if needs else 0.0,
        W=sum(x.weight.at(rows) for x in layers) + (0.0 if needs else sum(inputs)),
        R=_again(layers, rows),
        input=arriving,
        output=output,
        kept=kept,
        checkpoint=arriving,
        pending=pending,
        forward=_forward(layers, blocks, rows),
        forward_again=_forward(layers, blocks, rows, keeps=False),
        again=_forward(layers, blocks, rows, again=True),
        whole=wholes,
        half=half,
        weight=weights,
        adding=[adding(k) for k in range(SUMMED)],
        weights=sum(trainable),
        parameters=sum(x.parameters for x in memory),
        keeps_input=bool(blocks.arriving.savers),
        keeps_output=bool(blocks.leaving.savers),
        stashed=blocks.stashed,
        popped=blocks.popped,
        sent=blocks.sent,
    )


def _at(peak: Peak, rows: float) -> Peak:
    return Peak(peak.free.at(rows), peak.held.at(rows))


def _again(layers: Sequence[Layer], rows: float) -> float:
    """The time of a second run, which ends at the last tensor that has to be computed again."""
    for k in reversed(range(len(layers))):
        layer = layers[k]
        # The input of the partition is kept, and so is what it pops from others.
        saves = layer.memory.saves_output or layer.memory.inner.at(rows)
        saves = saves or any(x.saved for x in layer.memory.stashed.values())
        own = {skip for x in layers[:k] for skip in x.memory.stashed}
        saves = saves or any(x.saved for s, x in layer.memory.popped.items() if s in own)
        if saves or (layer.memory.saves_input and k):
            return sum(x.forward.at(rows) for x in layers[:k]) + layer.again.at(rows)
    return 0.0


def _forward(
    layers: Sequence[Layer],
    blocks: Blocks,
    rows: float,
    *,
    keeps: bool = True,
    again: bool = False,
) -> float:
    """The most memory during a forward, above that before, without the input.

    A second run ends at the last tensor that it saves.

    Args:
        layers: the layers.
        blocks: their memory.
        rows: the rows of a micro-batch.
        keeps: whether something is kept for backward.
        again: whether it is the second run.
    """
    held = peak = 0.0
    for k, layer in enumerate(layers):
        is_last = k + 1 == len(layers)
        most = layer.memory.again if again and is_last else layer.memory.forward
        peak = max(peak, held + most.at(rows))
        held += blocks.after(k, keeps=keeps)
    return peak


def _backward(
    blocks: Blocks, peaks: Sequence[Peak], stay: Sequence[float], *, is_held: bool = True
) -> float:
    """The most memory during a backward, above that before, with the gradients of the output.

    Args:
        blocks: the memory of the layers.
        peaks: the most memory of each layer's backward.
        stay: the memory of the gradients of each layer's weights that stay until the end.
        is_held: whether the gradients of the output, and of skips to others, stay, too.
    """
    held = peak = blocks.sizes[-1] + sum(blocks.leaves)
    for k in reversed(range(len(blocks))):
        given = blocks.leaves[k]
        is_last = k + 1 == len(blocks)
        most = peaks[k].held if is_last else peaks[k].free + (given if is_held else 0.0)
        peak = max(peak, held - blocks.sizes[k + 1] - blocks.stays[k] - given + most)
        # The gradient of the input takes the place of that of the output.
        held += blocks.passed[k] - blocks.stays[k] - blocks.freed(k) + stay[k]
        if not (is_last and is_held):
            held -= blocks.gone(k)
        if not is_held:
            held -= given
    return peak


def _half(layers: Sequence[Layer], blocks: Blocks, rows: float) -> float:
    """The most memory during I, above that before, with the gradients of the output.

    What cells keep goes at the end.
    """
    held = peak = blocks.sizes[-1] + sum(blocks.leaves)
    for k in reversed(range(len(blocks))):
        own = layers[k].memory.backward
        given = blocks.leaves[k]
        is_last = k + 1 == len(blocks)
        most = own.half.held.at(rows) if is_last else own.half.free.at(rows) + given
        peak = max(peak, held - blocks.sizes[k + 1] - blocks.stays[k] - given + most)
        held += blocks.passed[k] + own.noted.at(rows)
        if not (is_last or own.notes_output):
            held -= blocks.gone(k) + blocks.stays[k]
    return peak
