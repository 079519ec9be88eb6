"""Lower bounds of the time of a step and of its memory, for many cuts and modes at once.

They are for a proof that nothing better was overlooked. So they share nothing with the planner's
search: neither its order, nor its simulator, nor its walk over memory. What a partition takes by
itself is the planner's: sums over the layers that were measured.

A cut may be known up to some stage only. What comes after it keeps no worker busy then, but a
micro-batch still needs the forward of all layers left, and their backward. Skips take no time here,
and memory is only what a worker surely has: its weights with gradients and the state of the
optimizer, what its cells in flight keep, and the most that a computation of its own needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torchgpipe.planner.problem import HOST
from torchgpipe.planner.trial import Setting, Trials
from torchgpipe.schedule.program import Op, Program, operations
from torchgpipe.schedule.rewrite import checkpointed
from torchgpipe.schedule.trips import Trip, trips

__all__ = ["KEEPING", "Bounds", "Costs"]

#: An array of numbers, one for each cut.
Numbers: TypeAlias = Any

#: The modes, by number. The last one stands for all ways to send cells to the host.
KEEPING = ("never", "except_last", "always", "offload")

#: What a partition takes, by the name that it has here.
NAMES = [*"FIWR", "held", "stored", "weights", "gradients", "forward", "light", "first", "later"]
NAMES += ["half", "pending", "weight", "out", "back", "all"]


class Costs:
    """The costs of each partition, by its first layer and the one after its last.

    Args:
        trials: the problem.
        m: the number of micro-batches.
        splits: whether backward is in halves.
    """

    def __init__(self, trials: Trials, m: int, splits: bool) -> None:
        self.problem = problem = trials.problem
        self.m, self.splits, self.count = m, splits, problem.count
        links = problem.links
        self.of = {x: np.zeros((self.count + 1,) * 2, np.float32) for x in NAMES}
        for start in range(self.count):
            for stop in range(start + 1, self.count + 1):
                ends = start, stop + (problem.has_loss and stop == self.count)
                stage, time = trials.stage(*ends, m), trials.times(*ends, m, splits)
                half, pending, weight = stage.halves if splits else (0.0, 0.0, [0.0])
                own = stage.weights.all + problem.state * stage.weights.trainable
                # What others get may stay with them.
                away = max(0.0, stage.held - sum(stage.leaving.values()))
                out, back = (
                    min([y.at(away) for x, y in links.items() if x[way] == HOST], default=0.0)
                    for way in (1, 0)
                )
                found = [*time, stage.held, stage.stored, own, stage.weights.trainable]
                found += [*stage.forward, *stage.whole, half, pending, min(weight), out, back]
                for name, x in zip(NAMES, [*found, m * (time.F + time.I + time.W)]):
                    self.of[name][start, stop] = x
        between, within = (
            [y for (a, b), y in links.items() if min(a, b) >= 0 and (a == b) == is_own]
            for is_own in (False, True)
        )
        #: By boundary: the time of a copy there and of the gradient's back, of clones of both, the
        #: bytes that are kept of what arrives, and those of them that are kept until W.
        self.at = {
            x: np.zeros(self.count + 1, np.float32)
            for x in ("copy F", "copy B", "clone F", "clone B", "kept", "late")
        }
        for k in range(1, self.count):
            # These come from the stage before, wherever that begins.
            for value in trials.stage(k, k + 1, m).arrivals:
                if value.source != k - 1:
                    continue
                self.at["kept"][k] += value.size * value.is_kept
                self.at["late"][k] += value.size * value.is_pending
                sizes = (("F", value.size), ("B", value.gradient))
                for copied, size in sizes if problem.links else ():
                    if size:
                        took = min(y.at(size) for y in between)
                        name = f"copy {copied}"
                        self.at[name][k] = max(self.at[name][k], took)
                        self.at[f"clone {copied}"][k] += min(
                            [y.at(size) for y in within], default=0.0
                        )


class Step(NamedTuple):
    """A computation, with the numbers of those that it waits for and the stages that these are of.

    Args:
        w: its worker.
        op: the computation.
        waits: the steps of other stages, each with the name of the copy from there.
    """

    w: int
    op: Op
    waits: Sequence[tuple[int, tuple[str, int]]]


def steps_of(program: Program) -> list[Step]:
    """The computations of a program, each after those that it needs."""
    lines = [[op for x in line for op in operations(x)] for line in program]
    last = max(op.stage for line in lines for op in line)
    halved = {(op.stage, op.microbatch) for line in lines for op in line if op.kind == "I"}
    place: dict[Op, int] = {}
    at = [0] * len(lines)
    steps: list[Step] = []
    while any(k < len(line) for k, line in zip(at, lines)):
        before = len(steps)
        for w, line in enumerate(lines):
            while at[w] < len(line):
                op = line[at[w]]
                waits: list[tuple[Op, tuple[str, int]]] = []
                if op.kind == "F" and op.stage:
                    waits = [(op._replace(stage=op.stage - 1), ("F", op.stage))]
                elif op.kind in "BI" and op.stage < last:
                    next_one = op.stage + 1, op.microbatch
                    source = Op(next_one[0], "I" if next_one in halved else "B", next_one[1])
                    waits = [(source, ("B", next_one[0]))]
                if any(x not in place for x, _ in waits):
                    break
                place[op] = len(steps)
                steps.append(Step(w, op, [(place[x], way) for x, way in waits]))
                at[w] += 1
        assert len(steps) > before, "a program without deadlocks"
    return steps


class Bounds:
    """The bounds of cuts under one schedule.

    Args:
        setting: the schedule.
        costs: what partitions take.
    """

    def __init__(self, setting: Setting, costs: Costs) -> None:
        self.costs, self.placement = costs, setting.schedule.placement
        self._base, self._m = setting.schedule.program, setting.schedule.chunks
        self.stages, self.workers = len(self.placement), max(self.placement) + 1
        #: The steps without recomputations, and with all.
        self._steps = [
            steps_of(checkpointed(self._base, mode, self._m)) for mode in ("never", "always")
        ]
        self._some = checkpointed(self._base, "except_last", self._m)
        self._again = {op for x in self._some for y in x for op in operations(y) if op.kind == "R"}
        # What has a way to leave with nothing computed again has one with recomputations, too.
        lines = [trips(line, [2] * self.stages) for line in self._base]
        self._trips = {(x.stage, x.microbatch): x for found in lines for x in found}
        self.line = cache(self._line)

    # Time.

    def time(self, ends: Numbers, modes: Numbers) -> Numbers:
        """The least time of a step.

        Args:
            ends: a line for each cut, of the ends of its first stages, from 0.
            modes: the number of the mode of each of these stages.
        """
        known = ends.shape[1] - 1
        took, delay = self._durations(ends)
        # What a micro-batch needs after the stages that are known, until its gradient is back.
        e, end, of = ends[:, known], self.costs.count, self.costs.of
        there, back = of["F"][e, end], of["I"][e, end]
        back = back if self.costs.splits else back + of["W"][e, end]
        sent: dict[int, Numbers] = {}
        joined: dict[int, Numbers] = {}
        zero = np.zeros(len(ends), np.float32)
        free, done = [zero] * self.workers, list[Numbers]()
        host = _Host(ends, modes, self.costs, self._trips, self.workers)
        again = {
            (j, mode): modes[:, j] == k for j in range(known) for k, mode in [(1, "some"), (2, "")]
        }
        again = {key: x for key, x in again.items() if x.any()}
        for w, op, waits in self._steps[bool(again)]:
            j, kind, i = op
            now = free[w]
            if kind == "R":
                for word in ("some", ""):
                    if (j, word) in again and (word == "" or op in self._again):
                        now = now + again[j, word] * took["R", j]
                free[w] = now
                done.append(now)
                continue
            for source, way in waits:
                more = delay.get(way)
                now = np.maximum(now, done[source] if more is None else done[source] + more)
            if known < self.stages and kind == "F" and j == self.stages - 1 and i in sent:
                now = np.maximum(now, sent[i] + there)
            elif known < self.stages and kind in "BI" and j == known:
                now = np.maximum(now, joined[i] + back)
            now = host.before(w, op, now)
            if (kind, j) in took:
                now = now + took[kind, j]
            free[w] = host.after(w, op, now)
            done.append(now)
            if kind == "F" and j == known - 1:
                sent[i] = now
            if kind == "F" and j == self.stages - 1:
                joined[i] = now
        return np.maximum.reduce(free)

    def _durations(self, ends: Numbers) -> tuple[dict[Any, Numbers], dict[Any, Numbers]]:
        """The time of each kind of each stage, and that of copies between stages that are known."""
        of, at, place = self.costs.of, self.costs.at, self.placement
        took: dict[Any, Numbers] = {}
        delay: dict[Any, Numbers] = {}
        for j in range(ends.shape[1] - 1):
            a, b = ends[:, j], ends[:, j + 1]
            took |= {(x, j): of[x][a, b] for x in "FIWR"}
            if j + 1 < self.stages and place[j] != place[j + 1]:
                took["F", j] = took["F", j] + at["clone F"][b]
                delay |= {(x, j + 1): at[f"copy {x}"][b] for x in "FB"}
            if j and place[j - 1] != place[j]:
                took["I", j] = took["I", j] + at["clone B"][a]
            took["B", j] = took["I", j] + took["W", j]
        return took, delay

    def loads(self, ends: Numbers) -> Numbers:
        """The least time that each worker is busy, with the forwards that it has to wait for first.

        Nothing is computed again, nor leaves: see :meth:`more`.
        """
        of, known = self.costs.of, ends.shape[1] - 1
        found = np.zeros((len(ends), self.workers), np.float32)
        for j in range(known):
            found[:, self.placement[j]] += of["all"][ends[:, j], ends[:, j + 1]]
        for w in range(1, self.workers):
            found[:, w] += of["F"][0, ends[:, min(self.placement.index(w), known)]]
        return found

    def more(self, ends: Numbers, modes: dict[int, int]) -> tuple[Numbers, Numbers]:
        """The time that a worker computes again, and that in which it sends to the host.

        Args:
            ends: the ends of the stages of each cut.
            modes: the numbers of the modes of its stages.
        """
        again, out = (np.zeros(len(ends), np.float32) for _ in range(2))
        for j, mode in modes.items():
            at = ends[:, j], ends[:, j + 1]
            if mode in (1, 2):
                some = sum(op.stage == j for op in self._again)
                again += (some if mode == 1 else self._m) * self.costs.of["R"][at]
            if mode == 3:
                out += sum(k == j for k, _ in self._trips) * self.costs.of["out"][at]
        return again, out

    # Memory.

    def _line(self, w: int, own: tuple[int, ...]) -> tuple[list[Op], list[Trip]]:
        """The computations of a worker whose first stages have some modes, and what leaves."""
        stages = [j for j, x in enumerate(self.placement) if x == w]
        modes = dict(zip(stages, own))
        words = [KEEPING[modes.get(j, 0) % 3] for j in range(self.stages)]
        line = checkpointed(self._base, words, self._m)[w]
        leaving = trips(line, [int(modes.get(j) == 3) for j in range(self.stages)])
        ops = [op for x in line for op in operations(x)]
        assert len(ops) == len(line), "no two computations at once"
        return ops, leaving

    def memory(self, w: int, ends: Numbers, own: tuple[int, ...]) -> Numbers:
        """The bytes that a worker has at least at some time.

        Args:
            w: the worker.
            ends: the ends of the stages of each cut.
            own: the numbers of the modes of the worker's own stages among them.
        """
        costs, place = self.costs, self.placement
        line, leaving = self.line(w, own)
        stages = [j for j in range(ends.shape[1] - 1) if place[j] == w]
        of = {(x, j): costs.of[x][ends[:, j], ends[:, j + 1]] for j in stages for x in NAMES[4:15]}
        apart = {j: 1.0 * (j > 0 and place[j - 1] != w) for j in stages}
        kept = {j: apart[j] * costs.at["kept"][ends[:, j]] for j in stages}
        late = {j: apart[j] * costs.at["late"][ends[:, j]] for j in stages}
        come, gone = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for trip in leaving:
            come[trip.back].append(trip.stage)
            gone[trip.gone].append(trip.stage)
        again = {(op.stage, op.microbatch) for op in line if op.kind == "R"}
        begun: set[int] = set()
        now = sum((of["weights", j] for j in stages), np.zeros(len(ends), np.float32))
        now = now + (
            costs.problem.given * (w == place[0]) + costs.problem.targets * (w == place[-1])
        )
        peak = now
        for k, (j, kind, i) in enumerate(line):
            for x in come[k]:
                now = now + of["held", x] + kept[x]
            if j in stages:
                is_again, grads = (j, i) in again, of["gradients", j] * (j not in begun)
                stays = kept[j] if is_again else late[j]
                if kind == "F":
                    peak = np.maximum(peak, now + of["light" if is_again else "forward", j])
                    now = now + of["stored" if is_again else "held", j] + kept[j]
                elif kind == "R":
                    now = now + of["held", j] - of["stored", j]
                elif kind == "B":
                    peak = np.maximum(peak, now + of["later" if j in begun else "first", j])
                    now = now + grads - of["held", j] - kept[j]
                elif kind == "I":
                    peak = np.maximum(peak, now + of["half", j])
                    now = now + of["pending", j] - of["held", j] + stays - kept[j]
                else:
                    peak = np.maximum(peak, now + of["weight", j])
                    now = now + grads - of["pending", j] - stays
                begun |= {j} if kind in "BW" else set()
                peak = np.maximum(peak, now)
            for x in gone[k]:
                now = now - of["held", x] - kept[x]
        return peak


class _Host:
    """The copies to the host and back, of stages that have sent some: no later than they can be.

    Args:
        ends: the ends of the stages of each cut.
        modes: the numbers of the modes of each.
        costs: what partitions take.
        trips: the cells that can leave, with their places in the line of the worker.
        workers: the number of workers.
    """

    def __init__(
        self,
        ends: Numbers,
        modes: Numbers,
        costs: Costs,
        trips: dict[tuple[int, int], Trip],
        workers: int,
    ) -> None:
        sends = {j: modes[:, j] == 3 for j in range(ends.shape[1] - 1)}
        self._sends = {j: x for j, x in sends.items() if x.any()}
        self._took = {
            (way, j): costs.of[way][ends[:, j], ends[:, j + 1]]
            for j in self._sends
            for way in ("out", "back")
        }
        self._trips = trips
        zero = np.zeros(len(ends), np.float32)
        self._free = {(way, w): zero for w in range(workers) for way in ("out", "back")}
        #: When each computation of a worker was done, and when what it has sent is gone.
        self._done: list[list[Numbers]] = [[zero] for _ in range(workers)]
        self._left: list[Numbers | None] = [None] * workers

    def _copy(self, way: str, w: int, j: int, now: Numbers) -> Numbers:
        end = np.maximum(now, self._free[way, w]) + self._took[way, j]
        self._free[way, w] = np.where(self._sends[j], end, self._free[way, w])
        return np.where(self._sends[j], end, 0)

    def before(self, w: int, op: Op, now: Numbers) -> Numbers:
        """When a computation may begin that was ready before."""
        trip = self._trips.get((op.stage, op.microbatch))
        if trip is None or op.stage not in self._sends or op.kind not in "BI":
            return now
        return np.maximum(now, self._copy("back", w, op.stage, self._done[w][trip.back]))

    def after(self, w: int, op: Op, now: Numbers) -> Numbers:
        """When the next computation may begin."""
        if not self._sends:
            return now
        end, left = now, self._left[w]
        now, self._left[w] = now if left is None else np.maximum(now, left), None
        if op.kind == "F" and op.stage in self._sends and (op.stage, op.microbatch) in self._trips:
            self._left[w] = self._copy("out", w, op.stage, end)
        self._done[w].append(now)
        return now
