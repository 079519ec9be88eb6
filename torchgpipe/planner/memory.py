"""The most memory that each device needs in a step, gone through in the order of the host.

Allocators count in the order in which the host issues work, and so does this. Weights, states of
the optimizer, gradients, cells between forward and backward, values and skips on their way, and
what a computation needs while it runs are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torchgpipe.planner.backward import SUMMED
from torchgpipe.planner.stages import Stage, ways
from torchgpipe.schedule.program import operations
from torchgpipe.schedule.rehearsal import Step
from torchgpipe.skip.namespace import Skip

__all__ = ["Issued", "issued", "peaks"]

#: How many gradients may arrive before the one before them is used, where autograd orders backward:
#: at the first stage, and at others. Autograd has a thread for each device, and the host's timing
#: decides which one is ahead. Where the caller issues forward, these are the most that the fence
#: allows for: it knows when a cell begins whose input needs no gradient, and when another one ends.
EARLY_AT_FIRST, EARLY = 2, 1

#: The share of the early micro-batches whose gradients of skips are counted as early, too. These
#: come from several devices, and on virtual accelerators between none and all of them were early.
#: So this is the middle, and no bound.
EARLY_SKIPS = 0.5


class Issued(NamedTuple):
    """The computations of a step in the order in which the host issues them.

    Args:
        computations: for each its worker, stage, kind and micro-batch. There is an R for each cell
            that is computed again.
        again: the stages and micro-batches of these cells.
        microbatches: the number of micro-batches.
    """

    computations: Sequence[tuple[int, int, str, int]]
    again: frozenset[tuple[int, int]]
    microbatches: int


def issued(order: Sequence[Step]) -> Issued:
    """The computations of the instructions that the host issues."""
    found = [(w, *op) for w, x, _ in order for op in operations(x)]
    again = frozenset((j, i) for _, j, kind, i in found if kind == "R")
    return Issued(found, again, 1 + max(i for *_, i in found))


def peaks(
    order: Issued,
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
        order: what the host issues.
        placement: the worker of each stage.
        stages: the stages.
        state: memory of the optimizer, for each byte of a parameter that it changes.
        given: memory of what the caller gives to the first stage.
        taken: memory of what the caller has of the last stage.
        is_summed: whether gradients are added up by a schedule, and not by autograd.
    """
    again = order.again
    now = [0.0] * (max(placement) + 1)
    for j, stage in enumerate(stages):
        now[placement[j]] += stage.parameters + state * stage.weights
    now[placement[0]] += given
    now[placement[-1]] += taken
    peak = [*now]
    last = len(stages) - 1
    backwards: Counter[int] = Counter()
    ends = {skip: way for way, skips in ways(stages).items() for skip in skips}
    #: The memory of each skip of a micro-batch, from its stash until nothing keeps it.
    waiting: dict[tuple[Skip, int], float] = {}
    #: Likewise of the gradients, until the cell that has stashed it takes them.
    grads: dict[tuple[Skip, int], float] = {}

    def during(w: int, more: float) -> None:
        if now[w] + more > peak[w]:
            peak[w] = now[w] + more

    def shared(j: int, i: int) -> float:
        """The memory of an input that is the output that the stage before keeps, of one worker."""
        if not j or placement[j - 1] != placement[j] or (j - 1, i) in again:
            return 0.0
        return stages[j].input * stages[j - 1].keeps_output

    def left(j: int) -> float:
        """The gradients of weights that a backward leaves behind; others are added to them."""
        backwards[j] += 1
        return stages[j].weights if backwards[j] == 1 else 0.0

    def sent(w: int, j: int, own: float, new: float) -> None:
        """Send what a worker has made to a stage, which takes new memory there.

        What leaves is there twice, until the copy is issued.
        """
        if placement[j] != w:
            during(w, own)
        now[placement[j]] += new
        during(placement[j], 0.0)

    def unsent(j: int, is_again: bool) -> float:
        """The skips that a cell has beside its output, until they are sent."""
        skips = stages[j].stashed.values()
        return sum(x.size for x in skips if not x.is_output and (is_again or not x.keeps))

    def stash(w: int, j: int, i: int) -> None:
        """Keep what a cell has stashed for others.

        A schedule sends it at once. Under autograd it waits as a clone for the cell that pops it.
        """
        is_again = (j, i) in again
        # Until it is sent, the original is there, too.
        rest = sum(x.size for x in stages[j].stashed.values() if is_again or not x.keeps)
        for skip, end in stages[j].stashed.items():
            there = placement[ends[skip][1]]
            is_kept = end.is_input if is_again else end.keeps
            new = 0.0 if there == w and is_kept else end.size
            waiting[skip, i] = new
            if there == w or not is_summed:
                now[w] += new
                during(w, rest)
                continue
            during(w, rest + end.size)
            now[there] += new
            during(there, 0.0)
            rest -= 0.0 if end.keeps and not is_again else end.size

    def pop(w: int, j: int, i: int) -> None:
        """Take what comes from others, where it is not there yet."""
        for skip in stages[j].popped:
            source = placement[ends[skip][0]]
            if source != w and not is_summed:
                now[w] += waiting[skip, i]
                during(w, 0.0)
                now[source] -= waiting[skip, i]

    def free(w: int, j: int, i: int, *, kept: bool) -> None:
        """Let go of what was popped, or of what of it nobody keeps."""
        for skip, end in stages[j].popped.items():
            if not (kept and end.keeps):
                now[w] -= waiting.pop((skip, i), 0.0)

    for w, j, kind, i in order.computations:
        stage = stages[j]
        output = stage.output if j < last else 0.0
        if stage.stashed and kind in "BI":
            output += sum(grads.pop((skip, i), 0.0) for skip in stage.stashed)
        number = min(backwards[j], SUMMED - 1)
        common = shared(j, i)
        checkpoint = stage.checkpoint - common
        kept = stage.kept - common * stage.keeps_input
        if kind == "F":
            is_again = (j, i) in again
            pop(w, j, i)
            during(w, stage.forward_again if is_again else stage.forward)
            # The input has arrived before.
            now[w] += (checkpoint if is_again else kept) - (stage.input - common)
            if not is_again:
                free(w, j, i, kept=True)
            if j < last:
                is_kept = stage.keeps_output and not is_again
                new = stages[j + 1].input - shared(j + 1, i)
                sent(w, j + 1, stage.output * (1 if is_kept else 2) + unsent(j, is_again), new)
            stash(w, j, i)
        elif kind == "R":
            during(w, stage.again)
            now[w] += kept - checkpoint
            free(w, j, i, kept=True)
            during(w, 0.0)
        elif kind == "W":
            during(w, stage.weight[number])
            now[w] += left(j) - stage.pending
        else:
            if kind == "I":
                most, more = stage.half, stage.pending
            elif is_summed:
                most, more = stage.whole[number], left(j)
            else:
                # The gradients of the last stage come from the loss, all at once.
                most_early = (EARLY if j else EARLY_AT_FIRST) if j < last else 0
                early = min(most_early, order.microbatches - 1 - backwards[j]) * (
                    stage.output + EARLY_SKIPS * sum(x.gradient for x in stage.stashed.values())
                )
                most, more = early + stage.adding[number], left(j)
            during(w, most - output)
            now[w] += more - kept - output
            free(w, j, i, kept=False)
            if j:
                sent(w, j - 1, stage.sent + stage.input, stage.input)
            for skip, end in stage.popped.items():
                stays = placement[ends[skip][0]] == w
                grads[skip, i] = end.holds if stays else end.gradient
                sent(w, ends[skip][0], stage.sent + end.gradient, grads[skip, i])
    return peak
