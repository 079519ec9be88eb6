"""Built-in schedules: stages in a row or in loops, or down the workers and up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate, permutations

from torchgpipe.checks import MOST, verify
from torchgpipe.schedule.greedy import greedy
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Instruction, Op, together
from torchgpipe.schedule.simulator import simulate

__all__: list[str] = [
    "checked",
    "fill_drain",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "interleaved_zero_bubble",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "down_and_up",
    "dualpipe_v",
    "v_half",
    "v_min",
    "zero_bubble_v",
    "wave",
]


# Schedules with stages in a row or in loops: fill-drain, 1F1B, interleaved and breadth-first.
#
# Letters in the docstrings: P workers, M micro-batches, v stages per worker. F, B, I and W are the
# times that all stages of a worker take together for one micro-batch. One activation is the memory
# that these stages keep for one micro-batch. The bubble is the time that the busiest worker waits.


__all__ += ["loop", "one_by_one"]


def checked(**counts: int) -> None:
    """Check that all counts are positive integers.

    Raises:
        ValueError: A count is not a positive integer.
    """
    for name, count in counts.items():
        verify(
            type(count) is int and count >= 1,
            f"{name} must be a positive integer",
            name,
            count,
            "use at least 1",
        )
        rule = f"{name} must be at most {MOST}, since a schedule lists each computation"
        verify(count <= MOST, rule, name, count, "use a smaller number")


def fill_drain(workers: int, chunks: int) -> Schedule:
    """Run all forwards, then all backwards, the last micro-batch first.

    Bubble ``(P - 1)(F + B)``; peak M activations.

    Source: Huang et al., GPipe (arXiv 1811.06965).
    """
    return looped_bfs(workers, chunks, stages_per_worker=1)


def looped_bfs(workers: int, chunks: int, stages_per_worker: int = 2) -> Schedule:
    """Run fill-drain in a loop: all micro-batches in one stage before the worker's next stage.

    Bubble ``(P - 1)(F + B) / v`` if M >= P; peak M activations.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv 2211.05953).
    """
    checked(workers=workers, chunks=chunks, stages_per_worker=stages_per_worker)
    placement = loop(workers, stages_per_worker)
    lines = []
    for w in range(workers):
        cells = [(j, i) for j in range(w, len(placement), workers) for i in range(chunks)]
        forward = [Op(j, "F", i) for j, i in cells]
        lines.append((*forward, *(Op(j, "B", i) for j, i in reversed(cells))))
    return Schedule(placement, chunks, tuple(lines))


def one_f_one_b(workers: int, chunks: int) -> Schedule:
    """Run backward as soon as possible: after a warm-up, forward and backward in turn (1F1B).

    Bubble ``(P - 1)(F + B)``; peak ``min(P, M)`` activations, on the first worker.

    Source: Fan et al., DAPPLE (arXiv 2007.01045); PipeDream-flush in Narayanan et al. (arXiv
    2006.09503).
    """
    return one_by_one(workers, chunks, 1, lambda w: workers - 1 - w)


def interleaved(workers: int, chunks: int, stages_per_worker: int = 2) -> Schedule:
    """Run 1F1B in a loop: P micro-batches in one stage, then the same in the worker's next stage.

    Bubble ``(P - 1)(F + B) / v`` and peak ``P + (P - 1) / v`` activations, if M is a multiple of P
    and more than P. If M is not a multiple of P, this is the schedule for the next multiple without
    the surplus micro-batches.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM (arXiv 2104.04473).
    """
    p, v = workers, stages_per_worker
    return one_by_one(p, chunks, v, lambda w: (v - 1) * p + 2 * (p - 1 - w))


def one_by_one(
    workers: int, chunks: int, stages_per_worker: int, warmup: Callable[[int], int]
) -> Schedule:
    """Run ``warmup(worker)`` forwards, then forward and backward in turn."""
    checked(workers=workers, chunks=chunks, stages_per_worker=stages_per_worker)
    placement = loop(workers, stages_per_worker)
    rounds = [range(i, i + workers) for i in range(0, chunks, workers)]
    lines = []
    for w in range(workers):
        stages = range(w, len(placement), workers)
        forward = [Op(j, "F", i) for some in rounds for j in stages for i in some]
        backward = [Op(j, "B", i) for some in rounds for j in reversed(stages) for i in some]
        count = min(warmup(w), len(forward))
        pairs = zip(forward[count:], backward)
        turns = [op for pair in pairs for op in pair]
        lines.append((*forward[:count], *turns, *backward[len(forward) - count :]))
    return Schedule(placement, len(rounds) * workers, tuple(lines)).first(chunks)


def loop(workers: int, times: int) -> tuple[int, ...]:
    """Place the stages round the workers, several times."""
    return tuple(range(workers)) * times


# Schedules whose weight gradients fill the bubbles: backward in halves, with W put off.
#
# Letters are as in the first section. Every step ends with a flush, so the bubble of the warm-up,
# ``(P - 1)F``, remains in every schedule with one stage per worker.
#
# Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241).


def zero_bubble_h1(workers: int, chunks: int) -> Schedule:
    """Run 1F1B in halves, with W of worker w deferred by w micro-batches.

    All workers then keep as much as the first worker.

    Bubble ``(P - 1) max(F, I, F + I - W)`` if M >= P; peak ``min(P, M)`` activations.
    """
    return one_f_one_b(workers, chunks).split().defer_weights(range(workers))


def zero_bubble_h2(workers: int, chunks: int) -> Schedule:
    """Run twice the warm-up of 1F1B, and defer W twice as long as :func:`zero_bubble_h1`.

    Bubble ``(P - 1) max(F, I - F, F + I - 2W)`` if M >= 2P - 1; peak ``min(2P - 1, M)``
    activations. At F = I = W it gains nothing over :func:`zero_bubble_h1`: its bubble is zero only
    if there is no flush between steps.
    """
    schedule = one_by_one(workers, chunks, 1, lambda w: 2 * (workers - 1 - w))
    return schedule.split().defer_weights([2 * w for w in range(workers)])


def interleaved_zero_bubble(workers: int, chunks: int, stages_per_worker: int = 2) -> Schedule:
    """Run :func:`~torchgpipe.schedule.interleaved` in halves, with the shortest possible warm-up.

    Bubble ``(P - 1) max(F, I, F + I - W) / v`` and peak P activations, if M is a multiple of P.
    """
    p, v = workers, stages_per_worker
    schedule = one_by_one(p, chunks, v, lambda w: (v - 1) * p + p - 1 - w)
    return schedule.split().defer_weights(range(p))


# Schedules with two stages per worker, placed as a V: down the workers, then up again.
#
# The first worker has the first and the last stage, so a micro-batch's backward starts on the
# worker where its forward ended. Letters are as in the first section.


class _Line:
    """The instructions of one worker, added as words: a kind and the first or second stage (F0).

    F, I and B take the next micro-batch of their stage. W takes the oldest I whose W is pending.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self.stages = worker, 2 * workers - 1 - worker
        self.counts: Counter[tuple[int, bool]] = Counter()
        self.pending: list[Op] = []
        self.instructions: list[Instruction] = []

    def add(self, times: int, words: str) -> None:
        """Add the words, several times. ``F0&B1`` is an overlap; ``W`` is of either stage."""
        for word in words.split() * times:
            ops = [self._op(part) for part in word.split("&")]
            self.instructions.append(together(ops))

    def _op(self, word: str) -> Op:
        kind, stages = word[0], [self.stages[int(x)] for x in word[1:]] or self.stages
        if kind == "W":
            first = next(op for op in self.pending if op.stage in stages)
            self.pending.remove(first)
            return first._replace(kind="W")
        counter = stages[0], kind == "F"
        op = Op(stages[0], kind, self.counts[counter])
        self.counts[counter] += 1
        if kind == "I":
            self.pending.append(op)
        return op


def down_and_up(workers: int) -> tuple[int, ...]:
    """Place the stages as a V: down the workers, then up again."""
    return (*range(workers), *reversed(range(workers)))


def zero_bubble_v(workers: int, chunks: int) -> Schedule:
    """Alternate both stages, so the memory of one stage shrinks while that of the other grows.

    Bubble ``(P - 1)F / 2`` at F = I = W if M >= 2P - 1, the least that this placement allows; peak
    P activations.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6.
    """
    checked(workers=workers, chunks=chunks)
    p, m = workers, max(chunks, 2 * workers - 1)
    lines = []
    for w in range(p):
        line = _Line(w, p)
        line.add(2 * (p - w) - 1, "F0")
        line.add(w, "F1 F0")
        line.add(p - w, "F1 I1 W1")
        line.add(m - (2 * p - 1 - w), "F0 I0 W0 F1 I1 W1")
        line.add(p - w - 1, "I0 W0 F1 I1 W1")
        line.add(w, "I0 I1")
        line.add(p - w, "I0 W0")
        line.add(w, "W1")
        line.add(w, "W0")
        lines.append(tuple(line.instructions))
    return Schedule(down_and_up(p), m, tuple(lines)).first(chunks)


def dualpipe_v(workers: int, chunks: int) -> Schedule:
    """Overlap the forward of one stage with the backward of the other, which hides their copies.

    Bubble ``(P - 1)F`` at F = I = W if overlaps gain nothing, and peak ``P + 1 / 2`` activations,
    if M >= 2P. For fewer micro-batches, this is the schedule for 2P without the surplus ones.

    Source: DeepSeek-AI, DeepSeek-V3 (arXiv 2412.19437), and github.com/deepseek-ai/DualPipe for V.
    """
    checked(workers=workers, chunks=chunks)
    p, m = workers, max(chunks, 2 * workers)
    lines = []
    for w in range(p):
        line = _Line(w, p)
        line.add(2 * (p - w - 1), "F0")
        line.add(w + 1, "F0 F1")
        line.add(p - w - 1, "I1 W1 F1")
        # As in DeepSeek's code, the last worker does not overlap its first F0 and B1.
        line.add(1, "F0 B1 F1&B0" if w == p - 1 else "F0&B1 F1&B0")
        line.add(m - 2 * p + w, "F0&B1 F1&B0")
        line.add(p - w - 1, "B1 F1&B0")
        ends = "10" * (w + 1)
        line.add(1, " ".join(f"B{x}" for x in ends[: w + 1]))
        line.add(1, " ".join(f"I{x}" for x in ends[w + 1 :]))
        line.add(p - w - 1, "W I0")
        line.add(w + 1, "W")
        lines.append(tuple(line.instructions))
    return Schedule(down_and_up(p), m, tuple(lines)).first(chunks)


def v_half(workers: int, chunks: int) -> Schedule:
    """Halve the memory of :func:`zero_bubble_v`: a micro-batch passes the workers faster.

    Bubble ``(7P - 8 - P % 2)F / 4`` at F = I = W if M >= 2P; peak ``(P + 2) // 2`` activations.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362).
    """
    checked(workers=workers, chunks=chunks)
    return _repeated(workers, chunks, (2, 1, 2, 1), (1, 0, 0) if workers % 2 else (3, 0, 4))


def v_min(workers: int, chunks: int) -> Schedule:
    """Use a third of the memory of :func:`zero_bubble_v`: a micro-batch passes as fast as possible.

    Bubble ``2PF - 2F`` (if P is a multiple of 3) or ``2PF - 5F / 2`` at F = I = W if M >= 2P, more
    if these times differ; peak ``(P + 4) // 3`` activations.

    Source: the paper of :func:`v_half`.
    """
    checked(workers=workers, chunks=chunks)
    return _repeated(workers, chunks, (1, 1, 1, 1), (0, 0, 0) if workers % 3 else (2, 0, 2))


def _repeated(
    workers: int, chunks: int, steps: tuple[int, int, int, int], gaps: tuple[int, int, int]
) -> Schedule:
    """Plan one micro-batch, with one unit of time per computation, and repeat it every six units.

    Args:
        workers: P.
        chunks: M.
        steps: the time from one worker to the next, for F down the V, F up, I down and I up.
        gaps: the extra time that the micro-batch waits at the ends of the V: at the bottom, at the
            top, and at the bottom again. With the gaps in use, no two computations of a worker
            fall into one unit. Of all gaps below six, these need the least memory (tried for P up
            to 12).
    """
    p = workers
    lines = []
    #: For each leg (F down the V, F up, I down, I up), the time when its first computation starts.
    begin = [0, *accumulate(step * (p - 1) + 1 + gap for step, gap in zip(steps, gaps))]
    for w in range(p):
        down, up = w, 2 * p - 1 - w
        legs = ((down, "F", w), (up, "F", p - 1 - w), (up, "I", w), (down, "I", p - 1 - w))
        times = {
            Op(j, kind, 0): first + step * distance
            for (j, kind, distance), first, step in zip(legs, begin, steps)
        }
        inputs = [op for op in times if op.kind == "I"]
        # F and I take four of the six units. Each W takes one of the others, as early as possible.
        left = {*range(6)} - {time % 6 for time in times.values()}
        choices: list[dict[Op, int]] = [
            {
                op._replace(kind="W"): times[op] + 1 + (unit - times[op] - 1) % 6
                for op, unit in pairs
            }
            for pairs in (zip(inputs, units) for units in permutations(left))
        ]
        soonest = min(choices, key=lambda choice: sum(choice.values()))
        times |= soonest
        order = sorted(
            (time + 6 * i, op._replace(microbatch=i))
            for op, time in times.items()
            for i in range(chunks)
        )
        lines.append(tuple(op for _, op in order))
    return Schedule(down_and_up(p), chunks, tuple(lines))


# Schedules whose stages go down the workers and up again, once for each wave.


def wave(workers: int, chunks: int, waves: int = 1) -> Schedule:
    """Place the stages down and up ``waves`` times, in memory for 3P / 2 micro-batches.

    Each worker has ``v = 2 * waves`` stages. The schedule is the faster of two list schedules at
    F = 1 and B = 2. The first one prefers the computation that has come farthest. The second one
    prefers forwards, in the order in which they would start if a micro-batch began every
    ``3 * waves`` units. Peak at most ``3P / 2`` activations, bubble at least
    ``(P - 1)(F + B) / v`` if M >= P. For P up to 8 the bubble is at most 3/2, 7/3 and 4 times this
    bound with 1, 2 and 3 waves.

    Source: Liu et al., Hanayo (arXiv 2308.15762), for the placement; the order is ours.
    """
    checked(workers=workers, chunks=chunks, waves=waves)
    placement = down_and_up(workers) * waves

    def farthest(op: Op) -> tuple[int, bool, int]:
        return -op.stage, op.kind == "B", op.microbatch

    def earliest(op: Op) -> tuple[bool, int, int]:
        # When F would start if each F took one unit, and a micro-batch began every 3 * waves.
        return op.kind == "B", op.stage + 3 * waves * op.microbatch, op.microbatch

    capacity = 2 * waves * (3 * workers // 2)
    made = [greedy(placement, chunks, key, capacity=capacity) for key in (farthest, earliest)]
    return min(made, key=lambda schedule: simulate(schedule).makespan)


#: The functions above whose schedules have one stage per worker (`ONE_STAGE`), two (`TWO_STAGES`),
#: or as many as an argument says (`ANY_STAGES`). :func:`wave` has two for each wave.
ONE_STAGE = (fill_drain, one_f_one_b, zero_bubble_h1, zero_bubble_h2)
TWO_STAGES = (zero_bubble_v, v_half, v_min, dualpipe_v)
ANY_STAGES = (interleaved, looped_bfs, interleaved_zero_bubble)
