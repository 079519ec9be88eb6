"""Figures of a step that was traced, and the costs of other settings that follow from them.

From one step nobody can tell which part of a time belongs to each row, and which to each call. So
the time of a device is taken to be in proportion to the rows, and the host's to be the same for
any number of them. Where the host is late, a computation runs while it is issued, and takes as
long as that. The device is taken to be busy half of this time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter
from statistics import median
from typing import Any, TypeAlias

from torchgpipe.partition.keeping import Keeping, offload_of
from torchgpipe.planner.observed import HostWait, TracedLayer
from torchgpipe.schedule.costs import Costs
from torchgpipe.show.span import TRIPS, Span

__all__: list[str] = []

#: The share of a step that the host holds up, from which on the least time of a computation counts,
#: and not the median: one that the host stretches takes longer.
LATE = 0.02
#: The share of the time to issue it from which on a computation runs while it is issued.
STRETCHED = 0.5

#: The kinds of times of a layer: computations, and the copies of what it keeps.
KINDS = (*"FIWR", *TRIPS)


@dataclass(frozen=True)
class Figures:
    """The times of the parts of a step, in milliseconds."""

    balance: tuple[int, ...]
    chunks: int
    #: The rows of the mini-batch; 0 if unknown.
    rows: int
    #: Of computations, and of a cell's copies to the host and back, by kind and partition.
    times: Mapping[tuple[str, int], float]
    #: Of a copy, by the partitions that it leads from and to.
    copies: Mapping[tuple[int, int], float]
    #: To issue each kind of computation.
    host: Mapping[tuple[str, int], float]
    #: All layers, in order; empty if they were not timed.
    layers: Sequence[TracedLayer]
    #: The stages whose forward makes the host wait.
    waits: Mapping[int, HostWait] = field(default_factory=dict)

    def costs(self, balance: Sequence[int], chunks: int, modes: Sequence[Keeping] = ()) -> Costs:
        """The costs of partitions of other sizes and modes, for micro-batches of other sizes."""
        scale = self.chunks / chunks
        ends = [*pairwise(accumulate(balance if self.layers else [1] * len(balance), initial=0))]
        each: dict[str, Any] = {
            kind: [scale * sum(x[kind] for x in self._each[a:b]) for a, b in ends] for kind in KINDS
        }
        offloads = [offload_of(x) for x in modes]
        away = [float(x is not None and bool(each["out"][j])) for j, x in enumerate(offloads)]
        each |= {"activation": away, "away": away} if any(away) else {"out": 0, "back": 0}
        copy = {
            (j, k): scale * time * self._bytes(balance, min(j, k))
            for (j, k), time in self.copies.items()
        }
        return Costs(**each, copy=copy)

    @property
    def without_strays(self) -> Figures:
        """The figures without the copies that layers make by themselves."""
        times = dict(self.times)
        for j, own in enumerate(self._by_partition):
            forward = sum(x.forward for x in own) if any(x.copied for x in own) else inf
            times |= {x: min(times[x], forward) for x in (("F", j), ("R", j)) if x in times}
        return replace(self, times=times)

    @property
    def layer_times(self) -> list[float]:
        """The time of each layer, forward and backward, of a micro-batch; none if not timed."""
        return [x["F"] + x["I"] + x["W"] for x in self._each] if self.layers else []

    @cached_property
    def _by_partition(self) -> list[Sequence[TracedLayer]]:
        return [self.layers[a:b] for a, b in pairwise(accumulate(self.balance, initial=0))]

    @cached_property
    def _each(self) -> list[dict[str, float]]:
        """The times of each layer, or of each partition, if its layers were not timed."""
        found = []
        for j, own in enumerate(self._by_partition):
            whole = sum(x.forward for x in own)
            shares = [x.forward / whole if whole else 1 / len(own) for x in own] or [1.0]
            found += [{kind: x * self._time(kind, j) for kind in KINDS} for x in shares]
        return found

    def _time(self, kind: str, j: int) -> float:
        """The time of a kind of computation, which may not have been among those of the step."""
        if (kind, j) in self.times or kind in TRIPS:
            return self.times.get((kind, j), 0.0)
        if kind == "R":
            return self._time("F", j)
        # No gradient of the input of the first partition is needed.
        share = 0.5 if j else float(kind == "W")
        return share * self.times.get(("B", j), 0.0)

    def _bytes(self, balance: Sequence[int], j: int) -> float:
        """The output of a partition, as a multiple of what it was."""
        if tuple(balance) == self.balance:
            return 1.0
        before = self.layers[sum(self.balance[: j + 1]) - 1].bytes
        return self.layers[sum(balance[: j + 1]) - 1].bytes / before if before else 1.0


def thread_of(
    by_autograd: bool, w: int | None, kind: str, i: int | None = 0, threads: int = 1
) -> Hashable:
    """Name the thread that issues a computation: for a backward under autograd, the worker's."""
    return w if by_autograd and kind != "F" else ("caller", (i or 0) % threads)


def figures_of(
    spans: Sequence[Span],
    balance: Sequence[int],
    by_autograd: bool,
    layers: Sequence[TracedLayer],
    rows: int,
    late: float,
    waits: Mapping[int, HostWait] = {},
    threads: int = 1,
) -> Figures:
    """Take the figures of the spans of a step, whose micro-batches have so many rows.

    Autograd's threads may issue the backward, and several threads the forward. The host is late for
    a share of the step.
    """
    computed = [x for x in spans if x.computes]
    copied = [x for x in spans if x.kind in TRIPS]
    # A backward that waits for its cell takes longer than that of a cell that has stayed.
    middle: Middle = min if late > LATE or copied else median
    chunks = 1 + max(x.microbatch or 0 for x in computed)
    host = _host(computed, by_autograd, waits, threads)
    times = _by(middle, (((x.kind, x.stage), x.time) for x in (*computed, *copied)))
    if late > LATE:
        # What takes much longer than the host does is not held up by it.
        spent = {x: time / (host.get(x) or inf) for x, time in times.items() if x in host}
        stretched = [x for x, share in spent.items() if STRETCHED <= share <= 1 / STRETCHED]
        times |= {x: times[x] / 2 for x in stretched}
    return Figures(
        tuple(balance),
        chunks,
        rows * chunks,
        times,
        _by(median, (((x.stage, x.target), x.time) for x in spans if x.kind == "copy")),
        host,
        layers,
        waits,
    )


Middle: TypeAlias = Callable[[list[float]], float]


def _by(middle: Middle, pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Make one number of all that have the same key."""
    groups: dict[Any, list[float]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return {key: float(middle(some)) for key, some in groups.items()}


def _host(
    computed: Sequence[Span], by_autograd: bool, waits: Mapping[int, HostWait], threads: int
) -> dict[tuple[str, int], float]:
    """The time to issue each kind of computation: from its issue to the next one of the thread."""
    lines: dict[Any, list[tuple[float, Span]]] = {}
    for x in computed:
        if x.issued is None:
            return {}
        # Under autograd each partition is a worker of its own.
        thread = thread_of(by_autograd, x.stage, x.kind, x.microbatch, threads)
        lines.setdefault(thread, []).append((x.issued, x))
    pairs: list[tuple[Any, float]] = []
    # A thread may have waited for something else in between.
    for line in lines.values():
        line.sort(key=itemgetter(0))
        for (at, x), (after, _) in pairwise(line):
            wait = waits.get(-1 if x.stage is None else x.stage) if x.kind == "F" else None
            # The wait of the first micro-batch alone is known.
            if wait is None or not x.microbatch:
                pairs.append(((x.kind, x.stage), max(0.0, after - at - (wait.time if wait else 0))))
    return _by(min, pairs)
