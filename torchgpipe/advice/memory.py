"""An estimate of the memory of other settings, from what a traced step has kept.

Cells keep activations from F, or from R, until their backward, and only their input from F until R.
What all cells keep is counted in the order in which the host issues them, for the step as it was
and for the other setting. The difference is added to what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchgpipe.schedule.program import operations
from torchgpipe.schedule.rehearsal import Step

__all__ = ["most"]


def most(
    order: Sequence[Step],
    places: Sequence[str],
    kept: Mapping[int, float],
    inputs: Sequence[float],
) -> dict[str, float]:
    """The most bytes that cells keep on each device.

    Args:
        order: the instructions as the host issues them, with an R for each cell that is computed
            again.
        places: the name of the device of each partition.
        kept: the bytes that a cell of each partition keeps for its backward.
        inputs: the bytes of the input of each partition that a cell keeps until it is computed
            again.
    """
    ops = [op for _, instruction, _ in order for op in operations(instruction)]
    again = {(op.stage, op.microbatch) for op in ops if op.kind == "R"}
    now = dict.fromkeys(places, 0.0)
    peak = dict(now)
    for j, kind, i in ops:
        place = places[j]
        if kind == "F":
            now[place] += inputs[j] if (j, i) in again else kept[j]
        elif kind == "R":
            now[place] += kept[j] - inputs[j]
        elif kind in "BW":
            now[place] -= kept[j]
        peak[place] = max(peak[place], now[place])
    return peak
