"""The most memory that each device needs in a step, gone through in the order of the host.

Allocators count in the order in which the host issues work, and so does this. Weights, states of
the optimizer, gradients, cells between forward and backward, values on their way, and what a
computation needs while it runs are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchgpipe.planner.stages import Stage
from torchgpipe.schedule.costs import Costs
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import operations
from torchgpipe.schedule.simulator import in_order

__all__ = ["peaks"]


def peaks(
    schedule: Schedule,
    stages: Sequence[Stage],
    costs: Costs,
    *,
    state: float,
    given: float,
    taken: float,
) -> list[float]:
    """Find the most memory of each worker.

    Args:
        schedule: the schedule, with an R for each cell that is computed again.
        stages: its stages.
        costs: their costs.
        state: memory of the optimizer, for each byte of a parameter that it changes.
        given: memory of what the caller gives to the first stage.
        taken: memory of what the caller has of the last stage.
    """
    placement = schedule.placement
    again = {
        (op.stage, op.microbatch)
        for line in schedule.program
        for x in line
        for op in operations(x)
        if op.kind == "R"
    }
    now = [0.0] * len(schedule.program)
    for j, stage in enumerate(stages):
        now[placement[j]] += stage.parameters + state * stage.weights
    now[placement[0]] += given
    now[placement[-1]] += taken
    peak = [*now]
    last = len(stages) - 1
    has_gradient: Counter[int] = Counter()

    def during(w: int, more: float) -> None:
        peak[w] = max(peak[w], now[w] + more)

    for w, instruction, _ in in_order(schedule, costs):
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
                new = 0.0 if has_gradient[j] or kind == "I" else stage.weights
                # A gradient that was just computed is added to the sum of those before.
                added = stage.largest if kind == "B" else 0.0
                during(w, stage.backward - (stage.output if j < last else 0.0) + added)
                during(w, new - stage.kept + 2 * stage.input)
                if kind == "I":
                    gone = stage.output if j < last else 0.0
                    during(w, stage.noted + 2 * stage.input - gone)
                now[w] += new - stage.kept
                has_gradient[j] += kind == "B"
                if kind == "I":
                    now[w] += stage.pending
                if j < last:
                    now[w] -= stage.output
                if j:
                    during(w, 2 * stage.input)
                    now[placement[j - 1]] += stage.input
            else:
                new = 0.0 if has_gradient[j] else stage.weights
                during(w, stage.weights + stage.largest)
                has_gradient[j] += 1
                now[w] += new - stage.pending
    return peak
