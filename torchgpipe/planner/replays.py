"""Replays of a traced step in other settings, with the host that issues them.

A device does not begin what the host has not issued, and is not done before the host has issued
all of it. So with layers that take less time than it takes to issue them, the host is what a step
waits for::

    host      F0 F1 F2 F3 ...          one line of instructions, in the order of the schedule
    device 0     F0-- F1-- F2--
    device 1          F0-- F1--

A replay of the step as it was must take the time that was measured. Otherwise something is going on
that the replay knows nothing of, and no advice is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise
from math import inf
from operator import itemgetter
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from torchgpipe.devices.recorder import memory_total
from torchgpipe.engine.step_plan import Choice, chosen, completed
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.partition.keeping import Keeping, is_policy, offload_of, recomputed_by
from torchgpipe.planner.choice import excess_of, placed
from torchgpipe.planner.memory import peaks
from torchgpipe.planner.stages import known
from torchgpipe.planner.trial import Problem
from torchgpipe.schedule.built_in import fill_drain
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, operations
from torchgpipe.schedule.simulator import Step, in_order
from torchgpipe.show.shares import Shares
from torchgpipe.show.span import TRIPS, Span

__all__: list[str] = []


#: By which factor several threads take longer to issue, since they take the interpreter from each
#: other. It was measured for small layers on four devices.
THREADED = 2

#: What a replay may be above the time that was measured, and below, as shares of it. What is below
#: is taken for something that stays as it is, such as a loss after the layers.
ABOVE, BELOW = 0.05, 0.3


#: The most modules that a sentence names.
FEW = 4


class Host(NamedTuple):
    """The host that issues a step.

    Args:
        time: the time to issue each kind of computation of each stage.
        by_autograd: whether threads of autograd issue the backward, one for each worker.
        threads: the number of threads that issue the forward, one micro-batch each.
        tails: how long the device goes on after the last wait in the code of a stage.
    """

    time: Mapping[tuple[str, int], float]
    by_autograd: bool
    threads: int = 1
    tails: Mapping[int, float] = {}


def replayed(order: Sequence[Step], table: Table, host: Host) -> float:
    """The time of a step, of instructions as the host issues them, by the times of the devices."""
    free: dict[int, float] = {}
    line_free: dict[Hashable, float] = {}
    end: dict[Op, float] = {}
    issued: dict[Op, float] = {}
    forward = 0.0
    workers = range(1 + max([w for w, _, _ in order], default=-1))
    tracks = table.tracks(tuple([tuple([x for v, x, _ in order if v == w]) for w in workers]))
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
        ready = free.get(w, 0.0)
        if tracks is not None:
            ready = tracks.before(w, max(begun, ready))
        begin = max(begun, ready, *(end[x] + table.delay((x, y)) for x, y in edges), 0.0)
        free[w] = max(begin + table.duration(instruction), done)
        if tracks is not None:
            free[w] = tracks.after(w, free[w])
        if kind in "FR" and j in host.tails:
            done = max(done, free[w] - host.tails[j])
        line_free[line] = done
        if line != w:
            forward = max(forward, done)
        for op in ops:
            end[op], issued[op] = free[w], done
    return max(end.values(), default=0.0)


@dataclass(frozen=True)
class Wrapping:
    """The way in which a model is wrapped.

    Args:
        balance: the layers of each partition.
        placement: the worker of each partition.
        chunks: the micro-batches of a step.
        modes: the checkpoint mode of each partition.
        schedule: None for the order of :class:`~torchgpipe.GPipe`.
        skips: the partitions that each skip leads from and to.
        threads: those of a :class:`~torchgpipe.MappedGPipe`, whose host issues the forward of one
            micro-batch after another; 0 for other wrappers.
    """

    balance: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    modes: tuple[Keeping, ...]
    schedule: Choice | None
    skips: tuple[tuple[int, int], ...]
    threads: int = 0

    def made(self) -> Schedule | None:
        """The schedule of a step, with its recomputations; None if the choice has none.

        What a policy keeps is no instruction that could be replayed.
        """
        workers, found = max(self.placement) + 1, None
        if self.schedule is None:
            found = fill_drain(workers, self.chunks)
        elif isinstance(self.schedule, Schedule):
            found = self.schedule
        else:
            # Some schedules need a number of micro-batches that their workers divide.
            with suppress(ValueError):
                found = chosen(self.schedule, len(self.placement), [workers], self.chunks)
        ways = self.chunks, self.placement
        if found is None or (found.chunks, found.placement) != ways:
            return None
        if any(map(is_policy, self.modes)):
            return None
        return completed(found, [*map(recomputed_by, self.modes)], self.skips, forward=False)


class Modules:
    """The mapped modules of a traced model, in the order of their calls, as if they were layers.

    A map that gives each device modules that follow each other is a balance of these modules. So
    another balance is another map.

    Args:
        device_map: the map.
        modules: the mapped modules, in the order of their calls.
    """

    def __init__(self, device_map: dict[str, torch.device], modules: Sequence[Mapped]) -> None:
        self._map, self._names = device_map, [x.name for x in modules]
        self._before = [x.device for x in modules]
        groups = [(x, len([*own])) for x, own in groupby(self._before)]
        self.devices = [device for device, _ in groups]
        #: How many modules each device has; none if the model comes back to a device.
        self.balance = tuple([size for _, size in groups])
        if len({*self.devices}) < len(groups):
            self.balance, self.devices = (), []
        homes: dict[torch.Tensor, set[int]] = {}
        for k, mapped in enumerate(modules):
            for x in mapped.module.parameters():
                homes.setdefault(x, set()).add(k)
        #: The numbers of modules that share a parameter, so they have one device.
        self._ties = [numbers for numbers in homes.values() if len(numbers) > 1]

    def allows(self, balance: Sequence[int]) -> bool:
        """Whether modules that share a parameter are on as few devices as before."""
        before, places = self._before, self._places(balance)
        return all(len({places[k] for k in x}) <= len({before[k] for k in x}) for x in self._ties)

    def map(self, balance: Sequence[int]) -> dict[str, torch.device]:
        """The device map of a balance."""
        return {**self._map, **dict(zip(self._names, self._places(balance)))}

    def words(self, balance: Sequence[int]) -> str:
        """Say which modules go elsewhere."""
        moved: dict[torch.device, list[str]] = {}
        for name, old, new in zip(self._names, self._before, self._places(balance)):
            if old != new:
                moved.setdefault(new, []).append(name)
        parts = [
            f"{', '.join(x) if len(x) <= FEW else f'{x[0]} to {x[-1]}'} on {device}"
            for device, x in moved.items()
        ]
        return f"with {', '.join(parts)}, the step"

    def _places(self, balance: Sequence[int]) -> list[torch.device]:
        return [x for x, size in zip(self.devices, balance) for _ in range(size)]


@dataclass(frozen=True)
class TracedStep:
    """The last step of a trace.

    Args:
        setting: how the model is wrapped.
        figures: what the parts of the step took.
        shares: how much each device computed and waited.
        makespan: the time of the step, in milliseconds.
        devices: the device of each partition.
        problem: what a plan of the model had measured; None if it was not planned.
        kept: the bytes that a cell of each partition keeps for its backward, as far as known.
        memory: the most bytes that each device has had in use, by its name.
        modules: the modules of a device map; None for layers.
        divisible: whether several threads may issue the forward.
    """

    setting: Wrapping
    figures: Figures
    shares: Sequence[Shares]
    makespan: float
    devices: Sequence[torch.device]
    problem: Problem | None
    kept: Mapping[int, float]
    memory: Mapping[str, int]
    modules: Modules | None = None
    divisible: bool = False

    @property
    def late(self) -> float:
        """The share of the step in which devices waited for the host."""
        return mean(x.host or 0.0 for x in self.shares)


class Replays:
    """Replays of a traced step in other settings."""

    def __init__(self, traced: TracedStep) -> None:
        self.traced = traced
        self._order = cache(_issued)
        #: The time of the setting that was traced, if it can be replayed.
        self.now = self.time(traced.setting)

    @property
    def are_right(self) -> bool:
        """Whether a replay of the step as it was takes the time that was measured."""
        return self.now is not None and -ABOVE <= 1 - self.now / self.traced.makespan <= BELOW

    def time(self, setting: Wrapping, *, copies: bool = True) -> float | None:
        """The milliseconds of a step, whose copies may take none; None if there is no schedule."""
        schedule, figures = setting.made(), self.traced.figures
        if schedule is None:
            return None
        costs = figures.costs(setting.balance, setting.chunks, setting.modes)
        table = Table(replace(costs, copy=0), schedule.placement, schedule.skips)
        if copies and isinstance(costs.copy, dict):
            # What was not copied took no time.
            table.copy |= {x: costs.copy.get(x, 0.0) for x in table.copy}
        threads, scale = max(1, setting.threads), figures.chunks / setting.chunks
        longer = THREADED if threads > 1 >= self.traced.setting.threads > 0 else 1
        time = {x: y * (longer if x[0] == "F" else 1) for x, y in figures.host.items()}
        tails = {j: scale * x.tail for j, x in figures.waits.items()}
        host = Host(time, setting.schedule is None, threads, tails)
        return replayed(self._order(schedule, setting.threads), table, host)

    @property
    def without_strays(self) -> float:
        """The share of the step's time that goes into copies that layers make by themselves."""
        traced = self.traced
        if not any(layer.copied for layer in traced.figures.layers):
            return 0.0
        without = Replays(replace(traced, figures=traced.figures.without_strays))
        return 0.0 if without.now is None else 1 - without.now / traced.makespan

    def gain(self, setting: Wrapping) -> float:
        """The share of the step's time that a setting saves.

        It is 0 if there is no such step, or if it is known not to fit into the memory.
        """
        modules = self.traced.modules
        if modules and setting.balance != modules.balance and not modules.allows(setting.balance):
            return 0.0
        time = self.time(setting)
        if time is None or self.now is None or self.excess(setting):
            return 0.0
        return (self.now - time) / self.traced.makespan

    def excess(self, setting: Wrapping) -> float | None:
        """The bytes by which the memory is too small for a setting; None if nobody knows."""
        traced, schedule = self.traced, setting.made()
        if schedule is None:
            return None
        order, has_loss = self._order(schedule, setting.threads), setting.schedule is not None
        ways = setting.balance, traced.devices, traced.figures.rows
        planned = excess_of(traced.problem, order, *ways, setting.modes, has_loss=has_loss)
        if planned is not None:
            return planned
        # An estimate is good enough to say no, but not to say yes, nor where cells leave.
        if (
            any(map(offload_of, (*setting.modes, *traced.setting.modes)))
            or setting.balance != traced.setting.balance
            or len(traced.kept) < len(setting.balance)
        ):
            return None
        before, after = self._most(traced.setting), self._most(setting)
        excess = max(traced.memory[str(x)] + after[x] - before[x] - memory_total(x) for x in after)
        return excess if excess > 0 else None

    def _most(self, setting: Wrapping) -> Mapping[torch.device, float]:
        """The most memory of what cells keep, whose difference counts.

        Cells keep activations from F, or from R, until their backward, and only their input from F
        until R.
        """
        traced, schedule = self.traced, setting.made()
        assert schedule is not None
        scale = traced.figures.chunks / setting.chunks
        ends = [0, *accumulate(setting.balance)]
        # Each module of a map keeps its arguments.
        inner = ends[1:] if setting.threads else [k + 1 for k in ends]
        given = [0, *(x.bytes for x in traced.figures.layers)]
        inputs = [scale * sum(given[a:b]) for a, b in zip(ends, inner[: len(ends) - 1])]
        stages = known([scale * traced.kept[j] for j in range(len(inputs))], inputs)
        order, placement, places = placed(self._order(schedule, setting.threads), traced.devices)
        found = peaks(order, placement, stages, state=0.0, given=0.0, is_summed=True, loss=None)
        return dict(zip(places, found))


def _issued(schedule: Schedule, threads: int) -> Sequence[Step]:
    """The instructions of a schedule as the host issues them, which has some threads for a map."""
    found = in_order(schedule)
    if not threads:
        return found

    def key(step: Step) -> tuple[int, int, int]:
        op = operations(step[1])[0]
        # The model's forward is called for one micro-batch, and then for the next one.
        return (0, op.microbatch, op.stage) if op.kind == "F" else (1, 0, 0)

    return sorted(found, key=key)


#: The share of a step that the host holds up, from which on the least time of a computation counts,
#: and not the median: one that the host stretches takes longer.
LATE = 0.02
#: The share of the time to issue it from which on a computation runs while it is issued.
STRETCHED = 0.5

#: The kinds of times of a layer: computations, and the copies of what it keeps.
KINDS = (*"FIWR", *TRIPS)


@dataclass(frozen=True)
class TracedLayer:
    """The figures of one layer.

    Args:
        forward: the time of its forward, in any unit.
        bytes: the memory of its output.
        device: its device.
        copied: the other devices that it copies from, or to, by itself.
    """

    forward: float
    bytes: int
    device: str = ""
    copied: Sequence[str] = ()


@dataclass(frozen=True)
class HostWait:
    """The wait of the host in the forward of a cell.

    Args:
        time: the milliseconds that it waits.
        tail: those that the device goes on for after the last wait, before the cell ends.
    """

    time: float
    tail: float


@dataclass(frozen=True)
class Figures:
    """The times of the parts of a step, in milliseconds.

    Args:
        balance: the layers of each partition.
        chunks: the number of micro-batches.
        rows: the rows of the mini-batch; 0 if unknown.
        times: the time of each kind of computation, and of a cell's copies to the host and back, by
            kind and partition.
        copies: the time of a copy, by the partitions that it leads from and to.
        host: the time to issue each kind of computation.
        layers: all layers, in order; empty if they were not timed.
        waits: the stages whose forward makes the host wait.
    """

    balance: tuple[int, ...]
    chunks: int
    rows: int
    times: Mapping[tuple[str, int], float]
    copies: Mapping[tuple[int, int], float]
    host: Mapping[tuple[str, int], float]
    layers: Sequence[TracedLayer]
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
        each["ahead"] = [x.ahead if x else 1 for x in offloads] or 1
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
            if any(layer.copied for layer in own):
                forward = sum(layer.forward for layer in own)
                times |= {x: min(times[x], forward) for x in (("F", j), ("R", j)) if x in times}
        return replace(self, times=times)

    @property
    def layer_times(self) -> list[float]:
        """The time of each layer, forward and backward, of a micro-batch; none if not timed."""
        return [x["F"] + x["I"] + x["W"] for x in self._each] if self.layers else []

    @property
    def _by_partition(self) -> list[Sequence[TracedLayer]]:
        return [self.layers[a:b] for a, b in pairwise(accumulate(self.balance, initial=0))]

    @cached_property
    def _each(self) -> list[dict[str, float]]:
        """The times of each layer, or of each partition, if its layers were not timed."""
        found = []
        for j, own in enumerate(self._by_partition):
            times = {kind: self._time(kind, j) for kind in KINDS}
            whole = sum(x.forward for x in own)
            shares = [x.forward / whole if whole else 1 / len(own) for x in own] or [1.0]
            found += [{kind: share * x for kind, x in times.items()} for share in shares]
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
    """Name the thread that issues a computation of a worker.

    That is the caller's, or one of those that issue the forward, but for a backward under autograd,
    which has a thread for each worker.
    """
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
    """Take the figures of a step.

    Args:
        spans: those of the step.
        balance: the layers of each partition.
        by_autograd: whether autograd's threads issue the backward.
        layers: all layers; empty if they were not timed.
        rows: the rows of a micro-batch; 0 if unknown.
        late: the share of the step that the host holds up.
        waits: the stages whose forward makes the host wait.
        threads: the number of threads that issue the forward.
    """
    computed = [x for x in spans if x.computes]
    copied = [x for x in spans if x.kind in TRIPS]
    # A backward that waits for its cell takes longer than that of a cell that has stayed.
    middle: Callable[[list[float]], float] = min if late > LATE or copied else median
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


def _by(
    middle: Callable[[list[float]], float], pairs: Iterable[tuple[Any, float]]
) -> dict[Any, float]:
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
    for line in lines.values():
        line.sort(key=itemgetter(0))
        for (at, x), (after, _) in pairwise(line):
            wait = waits.get(-1 if x.stage is None else x.stage) if x.kind == "F" else None
            # The wait of the first micro-batch alone is known.
            if wait is None or not x.microbatch:
                pairs.append(((x.kind, x.stage), max(0.0, after - at - (wait.time if wait else 0))))
    # A thread may have waited for something else in between.
    return _by(min, pairs)
