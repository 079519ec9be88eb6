"""The costs of a schedule: the time to compute and to copy, and the memory that cells keep."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any, TypeAlias

from torchgpipe.checks import finite, has_entries, is_number, verify, verify_function, verify_kind
from torchgpipe.schedule.program import Edge, Instruction, Program, Skips, operations
from torchgpipe.schedule.trips import Known, Tracks, stops, trips

__all__ = ["Costs", "Each", "Table", "numbers"]

#: One number for all stages (or workers), or a sequence with a number for each of them.
Each: TypeAlias = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """The time of each computation and copy, and the memory of each cell, in any units.

    B takes ``I + W``. The input of stage 0 needs no gradient. If stage 0 therefore does all of its
    backward at W, write ``I=(0, 1, ...), W=(2, 1, ...)``. With Fractions all results are exact.

    Args:
        F, I, W, R: the time of each kind for one micro-batch.
        copy: the time of a copy between stages on two workers, or ``{(from, to): time}`` for
            outputs to the next stage, for skips, and for the gradients of both. Copies keep no
            worker busy.
        overlap: the time of an overlap, from the times of its two computations. By default the
            sum, as if one computation waited for the other; ``max`` if neither slows the other.
        activation: memory that a cell keeps from F (or from R, if it has one) until B or I.
        pending: memory that a cell keeps from I until W; as much as ``activation`` if None.
        checkpoint: memory that a cell with an R keeps from F until R.
        away: the part of ``activation`` that leaves for the memory of the host. A cell leaves if it
            has no R, and at least three instructions of its worker lie between its F and its B or
            I. Until the instruction after its F is done, it is there.
        out: the time to copy this to the host. The copies of a worker are made one after the other.
        back: the time to copy it back; as long as ``out`` if None. Copies to the host and back do
            not slow each other down.
        prefetch: how many instructions before its backward a cell comes back (its distance).
    """

    F: Each = 1
    I: Each = 1  # noqa: E741  # The field's name for it.
    W: Each = 1
    R: Each = 1
    copy: float | Mapping[tuple[int, int], float] = 0
    overlap: Callable[[float, float], float] = operator.add
    activation: Each = 1
    pending: Each | None = None
    checkpoint: Each = 0
    away: Each = 0
    out: Each = 0
    back: Each | None = None
    prefetch: int | Sequence[int] = 1


def numbers(name: str, value: Any, count: int) -> list[float]:
    """Return ``value`` as one number for each of ``count`` stages or workers.

    Raises:
        ValueError: A number is missing, negative or not finite.
    """
    entries = [*value] if has_entries(value) else [value] * count
    # A search checks thousands of costs, most of them floats, which need no call of is_number().
    valid = all(
        0 <= x < inf if type(x) is float else is_number(x) and x >= 0 and finite(x) for x in entries
    )
    if len(entries) != count or not valid or isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be a number, or a list of {count}, finite and not negative "
            f"({name}: {value}); give one for each stage (or worker), or one for all"
        )
    return entries


def checked_costs(costs: Costs) -> None:
    """Check that a value is costs.

    Raises:
        TypeError: it is none.
    """
    remedy = "pass such as Costs(F=1, I=1, W=1), or leave them out for one unit each"
    verify_kind(costs, Costs, "costs must be a Costs", "costs", remedy)


class Table:
    """Costs for one placement, with a number for each stage."""

    def __init__(self, costs: Costs, placement: Sequence[int], skips: Skips = ()) -> None:
        checked_costs(costs)
        verify_function(
            costs.overlap,
            "overlap must be a function of the times of two computations",
            "overlap",
            "use max if neither slows the other",
        )
        self.placement, self.overlap, count = placement, costs.overlap, len(placement)
        self.time = {kind: numbers(kind, getattr(costs, kind), count) for kind in "FIWR"}
        self.time["B"] = [i + w for i, w in zip(self.time["I"], self.time["W"])]
        self._keep(costs)
        there = [*pairwise(range(len(placement))), *skips]
        pairs = [(j, k) for j, k in there if placement[j] != placement[k]]
        pairs += [(k, j) for j, k in pairs]
        copy = costs.copy if isinstance(costs.copy, Mapping) else dict.fromkeys(pairs, costs.copy)
        self.copy = {x: numbers(f"copy of {x}", copy.get(x, "missing"), 1)[0] for x in pairs}

    def _keep(self, costs: Costs) -> None:
        """Store what cells keep, and what part of it leaves for the memory of the host."""

        def by_stage(name: str) -> list[float]:
            return numbers(name, getattr(costs, name), len(self.time["F"]))

        self.costs = costs
        self.checkpoint, self.activation = by_stage("checkpoint"), by_stage("activation")
        self.pending = self.activation if costs.pending is None else by_stage("pending")
        self.away, self.out = by_stage("away"), by_stage("out")
        self.back = self.out if costs.back is None else by_stage("back")
        verify(
            all(x <= y for x, y in zip(self.away, self.activation)),
            "away must be a part of activation",
            "away",
            costs.away,
            "give at most as much as a cell keeps",
        )
        prefetch = by_stage("prefetch")
        verify(
            all(k > 0 and k == int(k) for k in prefetch),
            "prefetch must be positive integers",
            "prefetch",
            costs.prefetch,
            "use 1, or 2 where copies take longer",
        )
        #: For each stage, how many instructions before its backward a cell comes back from the
        #: host's memory; 0 if the cells of the stage stay on the device.
        self.prefetch = tuple([int(k) if x else 0 for k, x in zip(prefetch, self.away)])

    def duration(self, instruction: Instruction) -> float:
        """Return how long an instruction keeps its worker busy."""
        times = [self.time[op.kind][op.stage] for op in operations(instruction)]
        if len(times) == 1:
            return times[0]
        time = self.overlap(*times)
        if not (is_number(time) and finite(time) and max(times) <= time):
            raise ValueError(
                "overlap must return a finite time, at least as long as the longer computation "
                f"(overlap{tuple(times)}: {time}); use max if neither slows the other"
            )
        return time

    def delay(self, edge: Edge) -> float:
        """Return the time of the copy along an edge; 0 within a worker."""
        return self.copy.get((edge[0].stage, edge[1].stage), 0)

    def tracks(self, program: Program, known: Known) -> Tracks | None:
        """The copies to the host and back in a simulation; None if nothing leaves.

        Args:
            program: the instructions of each worker.
            known: what :func:`stops` has found for it so far.
        """
        if not any(self.prefetch):
            return None
        lines = stops(program, self.placement, self.prefetch, known)
        return Tracks(lines, self.out, self.back)

    def held(self, line: Sequence[Instruction]) -> Iterator[float]:
        """Yield a worker's peak memory from the start of each instruction to that of the next."""
        stages = range(len(self.activation))
        known = [[op for op in operations(x) if op.stage in stages] for x in line]
        again = {(j, i) for ops in known for j, kind, i in ops if kind == "R"}
        come: list[float] = [0] * len(line)
        gone = [*come]
        for trip in trips(line, self.prefetch):
            come[trip.back] += self.away[trip.stage]
            gone[trip.gone] += self.away[trip.stage]
        now: float = 0
        for k, ops in enumerate(known):
            now += come[k]
            for j, kind, i in ops:
                if kind == "F":
                    now += (self.checkpoint if (j, i) in again else self.activation)[j]
                elif kind == "R":
                    now += self.activation[j] - self.checkpoint[j]
            during = now
            for j, kind, _ in ops:
                now -= self.activation[j] if kind in "BI" else 0
                now += {"I": self.pending[j], "W": -self.pending[j]}.get(kind, 0)
            now -= gone[k]
            yield max(during, now)

    def hosted(self, line: Sequence[Instruction]) -> float:
        """The most memory of the host that a worker has at any time."""
        changes: list[float] = [0] * (len(line) + 1)
        for trip in trips(line, self.prefetch):
            changes[trip.begin] += self.away[trip.stage]
            changes[trip.end + 1] -= self.away[trip.stage]
        return max(accumulate(changes))
