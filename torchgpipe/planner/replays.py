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

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, groupby
from statistics import mean

import torch

from torchgpipe.devices.recorder import memory_total
from torchgpipe.engine.step_plan import Choice, chosen, completed
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.partition.keeping import Keeping, is_policy, offload_of, recomputed_by
from torchgpipe.planner.figures import Figures, thread_of
from torchgpipe.planner.memory import Issued
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.trial import Trials
from torchgpipe.schedule.built_in import fill_drain
from torchgpipe.schedule.costs import Costs, Table
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, operations
from torchgpipe.schedule.simulator import Step, in_order
from torchgpipe.show.tables import Shares

__all__: list[str] = []

#: By which factor several threads take longer to issue, since they take the interpreter from each
#: other. It was measured for small layers on four devices.
THREADED = 2

#: What a replay may be above the time that was measured, and below, as shares of it. What is below
#: is taken for something that stays as it is, such as a loss after the layers.
ABOVE, BELOW = 0.05, 0.3

#: The most modules that a sentence names.
FEW = 4


def replayed(
    order: Sequence[Step],
    table: Table,
    host: Mapping[tuple[str, int], float],
    *,
    by_autograd: bool,
    threads: int = 1,
    tails: Mapping[int, float] = {},
) -> float:
    """Find the time of a step by the times of the devices, and of the host that issues it.

    Autograd's threads may issue the backward, one for each worker, and several threads the forward,
    one micro-batch each. A tail is how long the device goes on after the last wait in the code of a
    stage.
    """
    free: dict[int, float] = {}
    line_free: dict[Hashable, float] = {}
    end: dict[Op, float] = {}
    issued: dict[Op, float] = {}
    forward = 0.0
    workers = range(1 + max([w for w, _, _ in order], default=-1))
    program = tuple([tuple([x for v, x, _ in order if v == w]) for w in workers])
    tracks = table.tracks(program, {})
    for w, instruction, edges in order:
        ops = operations(instruction)
        j, kind, i = ops[0]
        line = thread_of(by_autograd, w, kind, i, threads)
        begun = line_free.get(line, 0.0)
        if line == w:
            begun = max(begun, forward, *(issued[x] for x, _ in edges))
        elif threads > 1:
            # On every stage they come one after the other.
            begun = max(begun, issued.get(Op(j, kind, i - 1), 0.0))
        done = begun + sum(host.get((op.kind, op.stage), 0.0) for op in ops)
        ready = free.get(w, 0.0)
        if tracks is not None:
            ready = tracks.before(w, max(begun, ready))
        begin = max(begun, ready, *(end[x] + table.delay((x, y)) for x, y in edges), 0.0)
        free[w] = max(begin + table.duration(instruction), done)
        if tracks is not None:
            free[w] = tracks.after(w, free[w])
        if kind in "FR" and j in tails:
            done = max(done, free[w] - tails[j])
        line_free[line] = done
        if line != w:
            forward = max(forward, done)
        for op in ops:
            end[op], issued[op] = free[w], done
    return max(end.values(), default=0.0)


@dataclass(frozen=True)
class Wrapping:
    """The way in which a model is wrapped."""

    balance: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    modes: tuple[Keeping, ...]
    #: None for the order of :class:`~torchgpipe.GPipe`.
    schedule: Choice | None
    #: The partitions that each skip leads from and to.
    skips: tuple[tuple[int, int], ...]
    #: Those of a :class:`~torchgpipe.MappedGPipe`, whose host issues the forward of one micro-batch
    #: after another; 0 for other wrappers.
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


@dataclass(frozen=True, eq=False)
class TracedStep:
    """The last step of a trace, and replays of it in other settings."""

    #: How the model is wrapped.
    setting: Wrapping
    figures: Figures
    shares: Sequence[Shares]
    makespan: float
    devices: Sequence[torch.device]
    #: What a plan of the model had measured; None if it was not planned.
    problem: Problem | None
    #: The bytes that a cell of each partition keeps for its backward, as far as known.
    kept: Mapping[int, float]
    #: The most bytes that each device has had in use, by its name.
    memory: Mapping[str, int]
    #: The modules of a device map; None for layers.
    modules: Modules | None = None
    #: Whether several threads may issue the forward.
    divisible: bool = False

    @property
    def late(self) -> float:
        """The share of the step in which devices waited for the host."""
        return mean(x.host or 0.0 for x in self.shares)

    @cached_property
    def _order(self) -> Callable[[Schedule, int], Sequence[Step]]:
        return cache(_issued)

    @cached_property
    def now(self) -> float | None:
        """The time of the setting that was traced, if it can be replayed."""
        return self.time(self.setting)

    @property
    def is_right(self) -> bool:
        """Whether a replay of the step as it was takes the time that was measured."""
        return self.now is not None and -ABOVE <= 1 - self.now / self.makespan <= BELOW

    def time(self, setting: Wrapping, *, copies: bool = True) -> float | None:
        """Predict the milliseconds of a step, with copies or as if they took no time.

        It is None if the setting has no schedule.
        """
        schedule, figures = setting.made(), self.figures
        if schedule is None:
            return None
        costs = figures.costs(setting.balance, setting.chunks, setting.modes)
        table = Table(replace(costs, copy=0), schedule.placement, schedule.skips)
        if copies and isinstance(costs.copy, dict):
            # What was not copied took no time.
            table.copy |= {x: costs.copy.get(x, 0.0) for x in table.copy}
        threads, scale = max(1, setting.threads), figures.chunks / setting.chunks
        longer = THREADED if threads > 1 >= self.setting.threads > 0 else 1
        return replayed(
            self._order(schedule, setting.threads),
            table,
            {x: y * (longer if x[0] == "F" else 1) for x, y in figures.host.items()},
            by_autograd=setting.schedule is None,
            threads=threads,
            tails={j: scale * x.tail for j, x in figures.waits.items()},
        )

    @property
    def strays(self) -> float:
        """The share of the step's time that goes into copies that layers make by themselves."""
        if not any(layer.copied for layer in self.figures.layers):
            return 0.0
        now = replace(self, figures=self.figures.without_strays).now
        return 0.0 if now is None else 1 - now / self.makespan

    def gain(self, setting: Wrapping) -> float:
        """The share of the step's time that a setting saves.

        It is 0 if there is no such step, or if it is known not to fit into the memory.
        """
        modules = self.modules
        if modules and setting.balance != modules.balance and not modules.allows(setting.balance):
            return 0.0
        time = self.time(setting)
        if time is None or self.now is None or self.excess(setting):
            return 0.0
        return (self.now - time) / self.makespan

    def excess(self, setting: Wrapping) -> float | None:
        """The bytes by which the memory is too small for a setting; None if nobody knows."""
        if setting.made() is None:
            return None
        problem, rows, has_loss = self.problem, self.figures.rows, setting.schedule is not None
        if problem is not None and problem.has_loss == has_loss and rows:
            limits = dict(zip(problem.places, problem.memory))
            if sum(setting.balance) == problem.count and limits.keys() >= {*self.devices}:
                places = [*dict.fromkeys(self.devices)]
                placement = tuple([places.index(x) for x in self.devices])
                order = Issued([(placement[op.stage], *op) for op in self._issued(setting)])
                ways = placement, setting.balance, setting.modes
                found = _trials_of(problem, rows).peaks(order, *ways)
                return max(0.0, *(x - limits[place] for x, place in zip(found, places)))
        # An estimate is good enough to say no, but not to say yes, nor where cells leave.
        if (
            any(map(offload_of, (*setting.modes, *self.setting.modes)))
            or setting.balance != self.setting.balance
            or len(self.kept) < len(setting.balance)
        ):
            return None
        before, after = self._held(self.setting), self._held(setting)
        excess = max(self.memory[str(x)] + after[x] - before[x] - memory_total(x) for x in after)
        return excess if excess > 0 else None

    def _held(self, setting: Wrapping) -> Mapping[torch.device, float]:
        """The most memory of what cells of each device keep, whose difference counts.

        Cells keep activations from F, or from R, until their backward, and only their input from F
        until R.
        """
        scale = self.figures.chunks / setting.chunks
        ends = [0, *accumulate(setting.balance)]
        # Each module of a map keeps its arguments.
        inner = ends[1:] if setting.threads else [k + 1 for k in ends]
        given = [0, *(x.bytes for x in self.figures.layers)]
        inputs = [scale * sum(given[a:b]) for a, b in zip(ends, inner[: len(ends) - 1])]
        kept = [scale * self.kept[j] for j in range(len(inputs))]
        costs = Costs(activation=kept, checkpoint=inputs, pending=0)
        table, lines = Table(costs, range(len(kept))), dict[torch.device, list[Op]]()
        for op in self._issued(setting):
            lines.setdefault(self.devices[op.stage], []).append(op)
        return {device: max(table.held(line)) for device, line in lines.items()}

    def _issued(self, setting: Wrapping) -> list[Op]:
        """The computations as the host issues them."""
        schedule = setting.made()
        assert schedule is not None
        order = self._order(schedule, setting.threads)
        return [op for _, x, _ in order for op in operations(x)]


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


@lru_cache(8)
def _trials_of(problem: Problem, rows: int) -> Trials:
    share = rows / problem.batch
    given, targets = share * problem.given, share * problem.targets
    return Trials(replace(problem, batch=rows, given=given, targets=targets))
