"""Schedules with stages in a row or in loops; some put W off, which fills their bubbles."""

from __future__ import annotations

from collections.abc import Callable

from torchgpipe.checks import MOST, verify
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op

__all__: list[str] = [
    "checked",
    "fill_drain",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "interleaved_zero_bubble",
    "zero_bubble_h1",
    "zero_bubble_h2",
]


# Schedules with stages in a row or in loops: fill-drain, 1F1B, interleaved and breadth-first.
#
# Letters in the docstrings: P workers, M micro-batches, v stages per worker. F, B, I and W are
# the times that all stages of a worker take together for one micro-batch, and one activation is
# the memory that they keep for it. The bubble is the time that the busiest worker waits.


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
# The letters are those of :mod:`torchgpipe.schedule.looped`. Every step ends with a flush, so the
# bubble of the warm-up, ``(P - 1)F``, remains in every schedule with one stage per worker.
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
