"""The most memory that each device needs in a step, gone through in the order of the host.

Allocators count in the order in which the host issues work, and so does this. Weights, states of
the optimizer, gradients, cells between forward and backward, values on their way, and what a
computation needs while it runs are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchgpipe.planner.stages import Stage
from torchgpipe.schedule.program import operations
from torchgpipe.schedule.rehearsal import Step

__all__ = ["peaks"]


def peaks(
    order: Sequence[Step],
    placement: Sequence[int],
    stages: Sequence[Stage],
    *,
    state: float,
    given: float,
    taken: float,
    is_summed: bool,
) -> list[float]:
    """Find the most memory of each worker.

    Args:
        order: the instructions as the host issues them, with an R for each cell that is computed
            again.
        placement: the worker of each stage.
        stages: the stages.
        state: memory of the optimizer, for each byte of a parameter that it changes.
        given: memory of what the caller gives to the first stage.
        taken: memory of what the caller has of the last stage.
        is_summed: whether gradients are added up by a schedule, and not by autograd.
    """
    again = {
        (op.stage, op.microbatch) for _, x, _ in order for op in operations(x) if op.kind == "R"
    }
    now = [0.0] * (max(placement) + 1)
    for j, stage in enumerate(stages):
        now[placement[j]] += stage.parameters + state * stage.weights
    now[placement[0]] += given
    now[placement[-1]] += taken
    peak = [*now]
    last = len(stages) - 1
    has_gradient: Counter[int] = Counter()

    def during(w: int, more: float) -> None:
        peak[w] = max(peak[w], now[w] + more)

    for w, instruction, _ in order:
        for j, kind, i in operations(instruction):
            stage = stages[j]
            if kind == "F":
                is_again = (j, i) in again
                during(w, stage.forward_again if is_again else stage.forward)
                # The input has arrived before.
                now[w] += (stage.checkpoint if is_again else stage.kept) - stage.input
                if j < last:
                    now[placement[j + 1]] += stages[j + 1].input
                    during(placement[j + 1], 0.0)
            elif kind == "R":
                during(w, stage.forward)
                now[w] += stage.kept - stage.checkpoint
                during(w, 0.0)
            elif kind in "BI":
                # The first gradient is autograd's own, so the sum of two is another tensor. Where
                # autograd orders backward, a gradient may arrive before the one before it is used.
                added = 2 * stage.output if not is_summed else stage.largest * (kind == "B")
                arrived = stage.output if j < last else 0.0
                new = 0.0 if has_gradient[j] or kind == "I" else stage.weights
                first = stage.first + (0.0 if is_summed else added)
                during(w, (first if new else stage.backward + added) - arrived)
                if kind == "I":
                    during(w, stage.noted + 2 * stage.input - arrived)
                now[w] += new - stage.kept
                has_gradient[j] += kind == "B"
                if kind == "I":
                    now[w] += stage.pending
                now[w] -= arrived
                if j:
                    now[placement[j - 1]] += stage.input
            else:
                new = 0.0 if has_gradient[j] else stage.weights
                # All gradients are there before they are added to the sums.
                during(w, stage.weights + (0.0 if new else stage.largest) + stage.output)
                has_gradient[j] += 1
                now[w] += new - stage.pending
    return peak
