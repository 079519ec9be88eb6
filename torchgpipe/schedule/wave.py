"""Schedules whose stages go down the workers and up again, once for each wave."""

from __future__ import annotations

from torchgpipe.schedule.greedy import greedy
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.looped import checked
from torchgpipe.schedule.program import Op
from torchgpipe.schedule.simulator import simulate
from torchgpipe.schedule.v_shaped import down_and_up

__all__ = ["wave"]


def wave(workers: int, chunks: int, waves: int = 1) -> Schedule:
    """Place the stages down and up ``waves`` times, in memory for 3P / 2 micro-batches.

    Each worker has ``v = 2 * waves`` stages. The schedule is the faster of two list schedules at
    F = 1 and B = 2. The first one prefers the computation that has come farthest. The second one
    prefers forwards, in the order in which they would start if micro-batches followed each other as
    fast as workers can take them. Peak at most ``3P / 2`` activations, bubble at least
    ``(P - 1)(F + B) / v`` if M >= P. For P up to 8 the bubble is at most 3/2, 7/3 and 4 times this
    bound with 1, 2 and 3 waves.

    Source: Liu et al., Hanayo (arXiv 2308.15762), for the placement; the order is ours.
    """
    checked(workers=workers, chunks=chunks, waves=waves)
    placement = down_and_up(workers) * waves

    def farthest(op: Op) -> tuple[int, bool, int]:
        return -op.stage, op.kind == "B", op.microbatch

    def earliest(op: Op) -> tuple[bool, int, int]:
        # A micro-batch keeps a worker busy for three units in each stage, one of them in F.
        return op.kind == "B", op.stage + 3 * waves * op.microbatch, op.microbatch

    capacity = 2 * waves * (3 * workers // 2)
    made = [greedy(placement, chunks, key, capacity=capacity) for key in (farthest, earliest)]
    return min(made, key=lambda schedule: simulate(schedule).makespan)
