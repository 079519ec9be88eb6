"""Costs of a partition: the times of its cells, and their memory at each moment.

The layers of a partition are gone through in the order in which they run, forward and backward, so
that the memory of a cell is known where it is highest, and not only where it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torchgpipe.planner.backward import SUMMED, Peak
from torchgpipe.planner.layers import Layer

__all__ = ["Stage", "stage_of"]


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
        alone: likewise of the first backward under autograd.
        adding: likewise of a later one.
        weights: the memory of the gradients of its weights.
        parameters: the memory of its parameters and buffers.
        keeps_input: whether cells keep the input.
        keeps_output: whether cells keep the output.
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
    alone: float
    adding: float
    weights: float
    parameters: float
    keeps_input: bool
    keeps_output: bool


class Part(NamedTuple):
    """The memory of one layer of a partition, for micro-batches of some rows.

    Args:
        before: memory of what is in front of it.
        behind: memory of what is behind it.
        keeps_before: whether cells keep what is in front of it.
        keeps_behind: whether they keep what is behind it.
        frees_behind: whether what is behind it goes when its own backward is over.
        frees_before: whether what is in front of it goes then.
        inner: memory that it keeps besides.
    """

    before: float
    behind: float
    keeps_before: bool
    keeps_behind: bool
    frees_before: bool
    frees_behind: bool
    inner: float


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
    parts = _parts(layers, rows, arriving)
    kept = sum(x.inner for x in parts) + sum(x.behind for x in parts if x.keeps_behind)
    kept += arriving * parts[0].keeps_before
    output = parts[-1].behind
    trainable = [float(x.trainable) for x in memory]
    small = [float(x.small) for x in memory]

    def whole(k: int) -> float:
        peaks = [_at(x.backward.whole[k], rows) for x in memory]
        return _backward(parts, peaks, small if k else trainable)

    wholes = [whole(k) for k in range(SUMMED)]
    pending = sum(x.backward.pending.at(rows) for x in memory) + sum(
        part.before for part, x in zip(parts, memory) if x.saves_input and x.trainable
    )
    half = _half(layers, parts, rows)
    # The gradients of all weights are there before they are added to the sums. The first sum is not
    # autograd's own, and so in memory of its own.
    each = zip(accumulate(trainable, initial=0.0), memory)
    weight = max(x + y.backward.weight.at(rows) for x, y in each)
    at_once = max((x.largest for x in memory if x.small < x.trainable), default=0)
    weights = [weight, max(weight, sum(trainable) + at_once), weight]
    if not needs:
        # I has nothing to do but to keep the gradient for W, which does all.
        pending, half, weights = kept + output, output, [x - output for x in wholes]
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
        forward=_forward(layers, parts, rows),
        forward_again=_forward(layers, [_dropped(x, k) for k, x in enumerate(parts)], rows),
        again=_forward(layers, parts, rows, again=True),
        whole=wholes,
        half=half,
        weight=weights,
        alone=_backward(
            parts,
            [Peak(x, x) for x in (y.backward.whole[0].free.at(rows) for y in memory)],
            trainable,
            is_held=False,
        ),
        adding=_backward(
            parts,
            [Peak(x, x) for x in (y.backward.adding.at(rows) for y in memory)],
            [0.0] * len(parts),
            is_held=False,
        ),
        weights=sum(trainable),
        parameters=sum(x.parameters for x in memory),
        keeps_input=parts[0].keeps_before,
        keeps_output=parts[-1].keeps_behind,
    )


def _at(peak: Peak, rows: float) -> Peak:
    return Peak(peak.free.at(rows), peak.held.at(rows))


def _parts(layers: Sequence[Layer], rows: float, arriving: float) -> list[Part]:
    """The memory of each layer of a partition whose input takes some memory."""
    memory = [x.memory for x in layers]
    edges = [arriving, *(x.output.at(rows) for x in memory)]
    found = []
    for k, x in enumerate(memory):
        made_before = k > 0 and memory[k - 1].saves_output
        used_behind = k + 1 < len(memory) and memory[k + 1].saves_input
        found.append(
            Part(
                edges[k],
                edges[k + 1],
                made_before or x.saves_input,
                x.saves_output or used_behind,
                # A tensor between two layers goes when the one in front is done, if that keeps it.
                x.saves_input and not made_before,
                x.saves_output,
                x.inner.at(rows),
            )
        )
    return found


def _dropped(part: Part, k: int) -> Part:
    """Layer ``k`` under checkpointing: it keeps nothing but the input of the partition."""
    return part._replace(keeps_before=k == 0, keeps_behind=False, inner=0.0)


def _again(layers: Sequence[Layer], rows: float) -> float:
    """The time of a second run, which ends at the last tensor that has to be computed again."""
    for k in reversed(range(len(layers))):
        layer = layers[k]
        # The input of the partition is kept.
        saves = layer.memory.saves_output or layer.memory.inner.at(rows)
        if saves or (layer.memory.saves_input and k):
            return sum(x.forward.at(rows) for x in layers[:k]) + layer.again.at(rows)
    return 0.0


def _forward(
    layers: Sequence[Layer], parts: Sequence[Part], rows: float, *, again: bool = False
) -> float:
    """The most memory during a forward, above that before, without the input.

    A second run ends at the last tensor that it saves.

    Args:
        layers: the layers.
        parts: their memory.
        rows: the rows of a micro-batch.
        again: whether it is the second run.
    """
    held = peak = 0.0
    for k, (layer, part) in enumerate(zip(layers, parts)):
        is_last = k + 1 == len(parts)
        most = layer.memory.again if again and is_last else layer.memory.forward
        peak = max(peak, held + most.at(rows))
        held += part.inner + part.behind
        if k and not part.keeps_before:
            held -= part.before
    return peak


def _backward(
    parts: Sequence[Part], peaks: Sequence[Peak], stay: Sequence[float], *, is_held: bool = True
) -> float:
    """The most memory during a backward, above that before, with the gradient of the output.

    Args:
        parts: the memory of the layers.
        peaks: the most memory of each layer's backward.
        stay: the memory of the gradients of each layer's weights that stay until the end.
        is_held: whether the gradient of the output stays, too.
    """
    given = parts[-1].behind if is_held else 0.0
    held = peak = parts[-1].behind
    for k in reversed(range(len(parts))):
        part = parts[k]
        is_last = k + 1 == len(parts)
        most = peaks[k].held if is_last else given + peaks[k].free
        peak = max(peak, held - part.behind + most)
        # The gradient of the input takes the place of that of the output.
        held += part.before - part.behind - part.inner + stay[k]
        if part.keeps_behind and part.frees_behind:
            held -= part.behind
        if part.keeps_before and part.frees_before:
            held -= part.before
    return peak


def _half(layers: Sequence[Layer], parts: Sequence[Part], rows: float) -> float:
    """The most memory during I, above that before, with the gradient of the output.

    What cells keep goes at the end.
    """
    held = peak = parts[-1].behind
    for k in reversed(range(len(parts))):
        part, own = parts[k], layers[k].memory.backward
        is_last = k + 1 == len(parts)
        most = own.half.held.at(rows) if is_last else own.half.free.at(rows)
        peak = max(peak, held - part.behind + most)
        held += part.before + own.noted.at(rows)
        if not (is_last or own.notes_output):
            held -= part.behind
    return peak
