"""Schedules whose weight gradients fill the bubbles: backward in halves, W wherever there is time.

The letters are those of :mod:`torchgpipe.schedule.looped`. All of a step's work ends in a flush
here, so the bubble of the warm-up, ``(P - 1)F``, remains in any schedule of one stage per worker.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.looped import one_by_one, one_f_one_b

__all__ = ["interleaved_zero_bubble", "zero_bubble_h1", "zero_bubble_h2"]


def zero_bubble_h1(workers: int, chunks: int) -> Schedule:
    """1F1B in which worker w puts off W by w micro-batches, so that all keep as much as the first.

    Bubble ``(P - 1) max(F, I, F + I - W)`` if M >= P; peak ``min(P, M)`` activations.
    """
    return one_f_one_b(workers, chunks).split().defer_weights(range(workers))


def zero_bubble_h2(workers: int, chunks: int) -> Schedule:
    """Twice the warm-up of 1F1B, and W put off twice as long as in :func:`zero_bubble_h1`.

    Bubble ``(P - 1) max(F, I - F, F + I - 2W)`` if M >= 2P - 1; peak ``min(2P - 1, M)``
    activations. At F = I = W it gains nothing over :func:`zero_bubble_h1`: its zero bubble is that
    of steps without a flush between them.
    """
    schedule = one_by_one(workers, chunks, 1, lambda w: 2 * (workers - 1 - w))
    return schedule.split().defer_weights([2 * w for w in range(workers)])


def interleaved_zero_bubble(workers: int, chunks: int, stages_per_worker: int = 2) -> Schedule:
    """:func:`~torchgpipe.schedule.interleaved` in halves, with as little warm-up as they allow.

    Bubble ``(P - 1) max(F, I, F + I - W) / v`` and peak P activations, if M is a multiple of P.
    """
    p, v = workers, stages_per_worker
    schedule = one_by_one(p, chunks, v, lambda w: (v - 1) * p + p - 1 - w)
    return schedule.split().defer_weights(range(p))
