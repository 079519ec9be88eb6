"""A replay of a step: its instructions, timed again with the host that issues them.

A device does not begin what the host has not issued, and is not done before the host has issued
all of it. So with layers that take less time than it takes to issue them, the host is what a step
waits for.

::

    host      F0 F1 F2 F3 ...          one line of instructions, in the order of the schedule
    device 0     F0-- F1-- F2--
    device 1          F0-- F1--
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.program import Op, operations
from torchgpipe.schedule.rehearsal import Step

__all__ = ["Host", "replayed", "thread_of"]

#: The thread of the caller, which issues all that no other thread does.
CALLER = "caller"


class Host(NamedTuple):
    """The host that issues a step.

    Args:
        time: the time that it takes to issue each kind of computation of each stage.
        by_autograd: whether the threads of autograd issue the backward, one for each worker; each
            waits until what its work needs was issued.
        threads: the number of threads that issue the forward, one micro-batch each.
        tails: the stages whose code waits for their device, and for how long the device goes on
            behind that.
    """

    time: Mapping[tuple[str, int], float]
    by_autograd: bool
    threads: int = 1
    tails: Mapping[int, float] = {}


def thread_of(
    by_autograd: bool, w: int | None, kind: str, i: int | None = 0, threads: int = 1
) -> Hashable:
    """Name the thread that issues a computation of a worker.

    Args:
        by_autograd: whether the threads of autograd issue the backward.
        w: the worker.
        kind: the kind of computation.
        i: the number of the micro-batch.
        threads: the number of threads that issue the forward.
    """
    return w if by_autograd and kind != "F" else (CALLER, (i or 0) % threads)


def replayed(order: Sequence[Step], table: Table, host: Host) -> float:
    """The time of a step.

    Args:
        order: the instructions as the host issues them.
        table: the times of the devices.
        host: the host.
    """
    free: dict[int, float] = {}
    line_free: dict[Hashable, float] = {}
    end: dict[Op, float] = {}
    issued: dict[Op, float] = {}
    forward = 0.0
    for w, instruction, edges in order:
        ops = operations(instruction)
        j, kind, i = ops[0]
        line = thread_of(host.by_autograd, w, kind, i, host.threads)
        begun = line_free.get(line, 0.0)
        if line == w:
            begun = max(begun, forward, *(issued[x] for x, _ in edges))
        elif host.threads > 1:
            # On every stage they come one after the other.
            begun = max(begun, issued.get(Op(j, kind, i - 1), 0.0))
        done = begun + sum(host.time.get((op.kind, op.stage), 0.0) for op in ops)
        begin = max(begun, free.get(w, 0.0), *(end[x] + table.delay((x, y)) for x, y in edges), 0.0)
        free[w] = max(begin + table.duration(instruction), done)
        if kind in "FR" and j in host.tails:
            done = max(done, free[w] - host.tails[j])
        line_free[line] = done
        if line != w:
            forward = max(forward, done)
        for op in ops:
            end[op], issued[op] = free[w], done
    return max(end.values(), default=0.0)
