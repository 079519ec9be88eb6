"""Costs of a partition: the times of its cells, and their memory at each moment.

The layers of a partition are gone through in the order in which they run, forward and backward, so
that the memory of a cell is known where it is highest, and not only where it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        noted: memory of the gradients that I notes for W.
        forward: the most memory during F, above that before, its input aside.
        forward_again: likewise of an F whose cell is computed again.
        backward: the most memory during B or I, above that before, with the gradient of the output.
        first: likewise during the first B, which leaves gradients of weights behind.
        weights: the memory of the gradients of its weights.
        largest: the largest gradient, which is there twice while it is added.
        parameters: the memory of its parameters and buffers.
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
    noted: float
    forward: float
    forward_again: float
    backward: float
    first: float
    weights: float
    largest: float
    parameters: float


def stage_of(layers: Sequence[Layer], rows: float, before: Layer | None) -> Stage:
    """Put layers together to a partition.

    Args:
        layers: its layers.
        rows: the rows of a micro-batch.
        before: the layer in front of the first one; None if the partition is the first, whose input
            is the caller's and takes no memory of a cell.
    """
    n = len(layers)
    arriving = before.output.at(rows) if before is not None else 0.0
    outputs = [x.output.at(rows) for x in layers]
    #: The memory of the tensor in front of each layer, and behind the last one.
    edges = [arriving, *outputs]
    #: Whether the layer in front of an edge keeps it, or the one behind.
    is_kept = [
        (k > 0 and layers[k - 1].saves_output) or (k < n and layers[k].saves_input)
        for k in range(n + 1)
    ]
    inner = [x.inner.at(rows) for x in layers]
    needs = before is not None and before.depends
    inputs = [x.input.at(rows) for x in layers]
    time_i = sum(inputs) if needs else 0.0
    time_w = sum(x.weight.at(rows) for x in layers) + (0.0 if needs else sum(inputs))
    kept = sum(inner) + sum(x for x, keep in zip(edges, is_kept) if keep)
    pending = sum(x.pending.at(rows) for x in layers) + sum(
        x for x, layer in zip(edges, layers) if layer.saves_input and layer.trainable
    )
    noted = sum(max(0.0, x.pending.at(rows) - y) for x, y in zip(layers, inner))
    if not needs:
        # I has nothing to do.
        pending, noted = kept, 0.0
    return Stage(
        F=sum(x.forward.at(rows) for x in layers),
        I=time_i,
        W=time_w,
        R=_again(layers, rows),
        input=arriving,
        output=outputs[-1],
        kept=kept,
        checkpoint=arriving,
        pending=pending,
        noted=noted,
        forward=_forward(layers, rows, edges, inner, is_kept),
        forward_again=_forward(layers, rows, edges, [0.0] * n, [True, *[False] * n]),
        backward=_backward(layers, rows, edges, inner, is_kept),
        first=_backward(layers, rows, edges, inner, is_kept, first=True),
        weights=sum(x.trainable for x in layers),
        largest=max(x.largest for x in layers),
        parameters=sum(x.parameters for x in layers),
    )


def _again(layers: Sequence[Layer], rows: float) -> float:
    """The time of a second run, which ends at the last tensor that has to be computed again."""
    for k in reversed(range(len(layers))):
        layer = layers[k]
        # The input of the partition is kept.
        if layer.saves_output or layer.inner.at(rows) or (layer.saves_input and k):
            return sum(x.forward.at(rows) for x in layers[:k]) + layer.again.at(rows)
    return 0.0


def _forward(
    layers: Sequence[Layer],
    rows: float,
    edges: Sequence[float],
    inner: Sequence[float],
    is_kept: Sequence[bool],
) -> float:
    """The most memory during a forward, above that before, without the input.

    What leaves is there twice, until the copy is issued.
    """
    held = peak = 0.0
    for k, layer in enumerate(layers):
        peak = max(peak, held + layer.forward_peak.at(rows))
        held += inner[k] + edges[k + 1]
        if k and not is_kept[k]:
            held -= edges[k]
    return max(peak, held + edges[-1])


def _backward(
    layers: Sequence[Layer],
    rows: float,
    edges: Sequence[float],
    inner: Sequence[float],
    is_kept: Sequence[bool],
    *,
    first: bool = False,
) -> float:
    """The most memory during a backward, above that before, with the gradient of the output.

    Args:
        layers: the layers.
        rows: the rows of a micro-batch.
        edges: the memory in front of each layer, and behind the last one.
        inner: the memory that each layer keeps.
        is_kept: whether cells keep what is in front of each layer, and behind the last one.
        first: whether the weights have no gradient yet. What was computed first stays then.
    """
    held = edges[-1]
    peak = held
    for k in reversed(range(len(layers))):
        layer = layers[k]
        peak = max(peak, held - edges[k + 1] + layer.backward_peak.at(rows))
        # The gradient of the input takes the place of that of the output.
        held += edges[k] - edges[k + 1] - inner[k]
        if first:
            held += layer.trainable
        # A tensor between two layers goes when the one in front of it is done, if that keeps it.
        if is_kept[k + 1] and layer.saves_output:
            held -= edges[k + 1]
        if is_kept[k] and not (k and layers[k - 1].saves_output):
            held -= edges[k]
    # What goes back is there twice, until the copy is issued.
    return max(peak, held + edges[0])
