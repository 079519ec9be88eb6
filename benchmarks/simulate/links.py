"""Bytes that the stages of a decoder send over links, and how long steps take with that, on paper.

A worker has ``layers`` layers of a decoder-only Transformer, and a micro-batch has ``rows`` rows of
``length`` tokens, whose features are ``width`` numbers of ``size`` bytes each::

    parameters of a worker     p = 12 * layers * width ** 2    (attention 4, feed-forward 8)
    a message                  rows * length * width * size    bytes: a value there, a gradient back
    a forward of a worker      F = 2 * p * rows * length / (peak * used)    seconds
    its backward               B = 2 * F, half of it for the input, half for the weights
    a copy                     message / link    seconds

So a copy takes ``size * peak * used / (24 * layers * width * link)`` forwards: neither rows nor
length matter. Embedding, head, the products of queries and keys, and the time until the first byte
arrives are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchgpipe.schedule import Costs, Op, Schedule
from torchgpipe.schedule.costs import Table
from torchgpipe.schedule.program import operations, walk

__all__ = ["Decoder", "costs", "highest", "makespans", "messages"]


@dataclass(frozen=True)
class Decoder:
    """The layers of a worker, its micro-batch, and its device.

    Args:
        width: numbers for each token.
        layers: layers of one worker.
        length: tokens of a row.
        rows: rows of a micro-batch.
        size: bytes of a number.
        peak: floating-point operations that the device can do in a second.
        used: share of the peak that training reaches.
    """

    width: int = 8192
    layers: int = 4
    length: int = 4096
    rows: int = 1
    size: int = 2
    peak: float = 989e12
    used: float = 0.4

    @property
    def parameters(self) -> int:
        """Parameters of a worker."""
        return 12 * self.layers * self.width**2

    @property
    def message(self) -> int:
        """Bytes that a stage sends to the next one for a micro-batch, or back."""
        return self.rows * self.length * self.width * self.size

    @property
    def forward(self) -> float:
        """Seconds of a forward through a worker's layers."""
        return 2 * self.parameters * self.rows * self.length / (self.peak * self.used)

    def copy(self, link: float) -> float:
        """Time of a copy, in forwards of a worker, over a link of so many bytes a second."""
        return self.message / link / self.forward

    def link(self, copy: float) -> float:
        """Bytes a second of the link whose copies take so many forwards of a worker."""
        return self.message / copy / self.forward


def costs(schedule: Schedule) -> Costs:
    """Costs of a schedule, in forwards of a worker, with copies that take one each."""
    share = len(schedule.program) / len(schedule.placement)
    return Costs(F=share, I=share, W=share, copy=1)


def messages(schedule: Schedule) -> int:
    """Number of messages in a step of the worker that sends the most."""
    sent = [0] * len(schedule.program)
    for here, there in pairwise(schedule.placement):
        if here != there:
            sent[here] += schedule.chunks
            sent[there] += schedule.chunks
    return max(sent)


def makespans(schedule: Schedule, copies: Sequence[float]) -> tuple[list[float], list[float]]:
    """Simulate a schedule with several costs of a copy at once, without and with queues.

    To walk through a large schedule takes longer than to add its times, so one walk does for all.
    In the first results a link carries any number of copies at once, as for
    :func:`torchgpipe.schedule.simulate`. In the second ones each worker has one link, which sends
    one message after another, in the order of its program.

    Args:
        schedule: a valid schedule without skips.
        copies: times of a copy, in forwards of a worker.
    """
    placement, table = schedule.placement, Table(costs(schedule), schedule.placement)
    count, both = len(copies), [*copies, *copies]
    free = [[0.0] * len(both) for _ in schedule.program]
    sending = [[0.0] * count for _ in schedule.program]
    #: When a computation has ended, and when its message has arrived.
    ends: dict[Op, list[float]] = {}
    arrived: dict[Op, list[float]] = {}
    for w, instruction, edges in walk(schedule.program, lambda waiting: None):
        begin = free[w]
        for edge in edges:
            source = arrived if table.delay(edge) else ends
            begin = [*map(max, begin, source[edge[0]])]
        duration = table.duration(instruction)
        free[w] = end = [time + duration for time in begin]
        for op in operations(instruction):
            ends[op] = end
            to = op.stage + {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
            if 0 <= to < len(placement) and placement[to] != w:
                start = [*end[:count], *map(max, end[count:], sending[w])]
                arrived[op] = [time + copy for time, copy in zip(start, both)]
                sending[w] = arrived[op][count:]
    last = [max(times) for times in zip(*free)]
    return last[:count], last[count:]


def highest(copies: Sequence[float], times: Sequence[float], limit: float) -> float:
    """Return a cost of copies up to which the time stays within a limit.

    The time is convex in the cost of copies: it is the longest of many paths, each of which is
    linear in it. So a straight line between two known costs is never below the time, and the result
    is on the safe side.

    Args:
        copies: costs of a copy, ascending, the first one within the limit.
        times: the time at each of them.
        limit: the time that is allowed.
    """
    known = [*zip(copies, times)]
    for (a, before), (b, after) in pairwise(known):
        if after > limit:
            return a + (b - a) * (limit - before) / (after - before)
    return copies[-1]
