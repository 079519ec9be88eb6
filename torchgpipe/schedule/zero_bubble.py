"""Schedules whose weight gradients fill the bubbles: backward in halves, with W put off.

The letters are those of :mod:`torchgpipe.schedule.looped`. Every step ends with a flush, so the
bubble of the warm-up, ``(P - 1)F``, remains in every schedule with one stage per worker.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.looped import one_by_one, one_f_one_b

__all__ = ["interleaved_zero_bubble", "zero_bubble_h1", "zero_bubble_h2"]


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
