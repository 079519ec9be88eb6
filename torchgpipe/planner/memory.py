"""The most memory that each device needs in a step, gone through in the order of the host.

Allocators count in the order in which the host issues work, and so does this. Weights, states of
the optimizer, gradients, cells between forward and backward, values on their way, and what a
computation needs while it runs are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, repeat
from operator import itemgetter
from typing import TypeAlias

from torch import Tensor, nn

from torchgpipe.partition.keeping import Offload
from torchgpipe.planner.record import Record
from torchgpipe.planner.stage_memory import Arrival, Stage, Weights, ways
from torchgpipe.schedule.program import Op, operations
from torchgpipe.schedule.simulator import Step
from torchgpipe.schedule.trips import NOTHING, Known, Stop, Trip, stops

__all__: list[str] = []

#: How many gradients may arrive before the one before them is used, where autograd orders backward:
#: at the first stage, and at others. Autograd has a thread for each device, and the host's timing
#: decides which one is ahead. Where the caller issues forward, these are the most that the fence
#: allows for: it knows when a cell begins whose input needs no gradient, and when another one ends.
EARLY_AT_FIRST, EARLY = 2, 1

#: A computation: its worker, stage, kind and micro-batch.
Computation: TypeAlias = tuple[int, int, str, int]

#: The memory of a loss outside, as multiples of all outputs: what is joined; the most of what it
#: keeps, and of gradients; and what is there for the whole of backward. One that is not known keeps
#: as much as its input, as differences, and a gradient. A cross entropy keeps logarithms, and two
#: gradients at a time, of which one stays. Inside, a loss takes no more, joined on demand or not.
UNKNOWN, CROSS_ENTROPY, INSIDE, ON_DEMAND = (1, 2, 2), (1, 3, 1), (1, 0, 0), (0, 0, 0)


class Issued:
    """The computations of a step, in the order of the host."""

    def __init__(self, computations: Sequence[Computation]) -> None:
        self.computations = computations
        #: The number of micro-batches, and the cells that are computed again.
        self.chunks: int = 1 + max(map(itemgetter(3), computations))
        self.again = {(j, i) for _, j, kind, i in computations if kind == "R"}
        self.lines = cache(self._lines)

    def _lines(self, numbers: tuple[int, ...]) -> tuple[list[list[Op]], Known]:
        """The computations of each line, by the line of each stage, and what is known of them."""
        found: list[list[Op]] = [[] for _ in range(1 + max(numbers))]
        for _, j, kind, i in self.computations:
            found[numbers[j]].append(Op(j, kind, i))
        return found, {}


def issued(order: Iterable[Step]) -> Issued:
    """The computations of instructions, as the host issues them: an R before what it is for."""
    return Issued([(w, *op) for w, x, _ in order for op in operations(x)])


class StepMemory:
    """The memory of each worker in a step, as the host issues its computations.

    Args:
        order: the computations.
        placement: the worker of each stage.
        stages: the memory of each stage.
        state: bytes of the optimizer's state for each byte of a parameter that is trained.
        given: bytes of the mini-batch's input, on the worker of the first stage.
        targets: bytes of the targets, on the worker of the last stage.
        is_summed: whether a schedule adds up gradients, which it does in place, and not autograd.
        loss: the memory of a loss outside, such as :data:`UNKNOWN`; None if the last stage has it.
        away: for each stage, the bytes of a cell that are in the memory of the host for a while.
        ahead: how many computations before its backward a cell of each stage comes back.
        aside: workers of which only what they receive and send counts.
    """

    def __init__(
        self,
        order: Issued,
        placement: Sequence[int],
        stages: Sequence[Stage],
        *,
        state: float,
        given: float,
        targets: float = 0.0,
        is_summed: bool,
        loss: tuple[int, int, int] | None,
        away: Sequence[float] = (),
        ahead: Sequence[int] = (),
        aside: Collection[int] = (),
    ) -> None:
        self._order, self._again, self._m = order, order.again, order.chunks
        self._placement, self._stages = placement, stages
        self._is_summed, self._loss, self._aside = is_summed, loss, aside
        self._now = [0.0] * (max(placement) + 1)
        for w, stage in zip(placement, stages):
            self._now[w] += stage.weights.all + state * stage.weights.trainable
        self._now[placement[0]] += given
        self._now[placement[-1]] += targets
        self._peak = [*self._now]
        # Under autograd the cells of each stage leave, and come back, by themselves.
        self._lines = (*placement,) if is_summed else (*range(len(placement)),)
        self._away, self._ahead = away, ahead
        #: What each stage gets, and what it gives to others.
        self._in = ways(stages)
        self._out: list[list[tuple[int, Arrival]]] = [[] for _ in stages]
        for k, arrivals in enumerate(self._in):
            for j, x in arrivals:
                self._out[j].append((k, x))
        #: The gradients that each stage gives back, as it holds them, and those that it gets.
        self._holds = [sum(x.holds for _, x in own) for own in self._in]
        self._gets = [sum(x.gradient for _, x in own) for own in self._out]
        #: What each stage sends to others, by whether the cell is computed again.
        self._gives: dict[tuple[int, bool], list[tuple[int, Arrival, float, float]]] = {}
        self._backwards: Counter[int] = Counter()
        #: The memory of each value of a micro-batch for a stage, until nothing keeps it there.
        self._waiting: dict[tuple[int, Arrival, int], float] = {}
        #: What of it is kept from I until W.
        self._late: dict[tuple[int, int], float] = {}
        #: The cell whose W needs the memory of a gradient that has arrived at another cell, too.
        self._views: dict[tuple[int, int], tuple[int, float]] = {}
        #: The gradients that have arrived at a cell.
        self._grads: dict[tuple[int, int], float] = {}

    def peaks(self, limits: Sequence[float] = ()) -> list[float]:
        """Find the most memory of each worker, up to where one has more than its limit, if any."""
        does = {"F": self._f, "R": self._r, "B": self._b, "I": self._i, "W": self._w}
        is_due, now, away = self._loss is not None, self._now, self._away
        at: list[Iterator[Stop]] = [repeat(NOTHING)] * (1 + max(self._lines))
        if any(self._ahead):
            lines, known = self._order.lines(self._lines)
            at = [*map(iter, stops(lines, self._lines, self._ahead, known))]
        #: By line, what is gone after its next computation.
        gone: list[Sequence[Trip]] = [()] * len(at)
        for w, j, kind, i in self._order.computations:
            if is_due and kind != "F":
                self._compute_loss()
                is_due = False
            own = self._lines[j]
            (back, _, begin), leaves = next(at[own]), gone[own]
            for trip in back:
                now[w] += away[trip.stage]
            does[kind](w, j, i)
            for trip in leaves:
                now[w] -= away[trip.stage]
            gone[own] = begin
            if limits and self._peak[w] > limits[w]:
                break
        return self._peak

    def _during(self, w: int, more: float) -> None:
        if self._now[w] + more > self._peak[w]:
            self._peak[w] = self._now[w] + more

    def _keeps(self, j: int, is_again: bool, x: Arrival) -> bool:
        """Whether a stage keeps what it gives, for its own backward."""
        for _, own in self._in[j]:
            # A layer that stashes its input hands on what has arrived, which a recomputation needs.
            if own.value == x.value:
                return is_again or own.is_kept
        return x.value in self._stages[j].kept and not is_again

    def _waits(self, j: int, k: int, x: Arrival) -> bool:
        """Whether what a stage gives waits there, as skips do under autograd."""
        return not self._is_summed and (x.is_skip or k > j + 1)

    def _f(self, w: int, j: int, i: int) -> None:
        stage, is_again = self._stages[j], (j, i) in self._again
        for source, x in () if self._is_summed else self._in[j]:
            if self._waits(source, j, x) and self._placement[source] != w:
                size = self._waiting[j, x, i]
                self._now[w] += size
                self._during(w, 0.0)
                self._now[self._placement[source]] -= size
        if w in self._aside:
            self._give(w, j, i)
            return
        self._during(w, stage.forward[is_again])
        self._now[w] += stage.stored if is_again else stage.held
        self._free(w, j, i, "is_stored" if is_again else "is_kept")
        if self._loss is not None and j + 1 == len(self._stages):
            self._now[w] += stage.output if is_again else stage.loose
        self._give(w, j, i)

    def _give(self, w: int, j: int, i: int) -> None:
        """Send what a cell has made."""
        key = j, (j, i) in self._again
        if key not in self._gives:
            self._gives[key] = self._sends(*key)
        for k, x, size, most in self._gives[key]:
            self._waiting[k, x, i] = size
            there = self._placement[k]
            if there == w:
                self._now[w] += size
                self._during(w, most)
                continue
            self._during(w, most)
            self._now[w if self._waits(j, k, x) else there] += size
            self._during(there, 0.0)

    def _sends(self, j: int, is_again: bool) -> list[tuple[int, Arrival, float, float]]:
        """Find each stage that gets something, its memory there, and the most above that before.

        The original is there until all of it is sent.
        """
        stage, w, found = self._stages[j], self._placement[j], []
        rest = {v: x for v, x in stage.leaving.items() if is_again or v not in stage.kept}
        for k, x in self._out[j]:
            is_here = self._placement[k] == w
            is_shared = is_here and (x.source < 0 or self._keeps(j, is_again, x))
            if is_here:
                rest.pop(x.value, None)
            most = sum(rest.values()) + (0.0 if is_here else x.size)
            found.append((k, x, 0.0 if is_shared else x.size, most))
        return found

    def _free(self, w: int, j: int, i: int, kept: str = "") -> None:
        """Let go of what has arrived, or of what of it nobody keeps, as a field of it says."""
        for _, x in self._in[j]:
            if not (kept and getattr(x, kept)):
                self._now[w] -= self._waiting.pop((j, x, i), 0.0)

    def _compute_loss(self) -> None:
        """Join the outputs, and compute a loss of them."""
        w, stage, m = self._placement[-1], self._stages[-1], self._m
        assert self._loss is not None
        whole, (is_joined, most, kept) = m * stage.output, self._loss
        if m > 1 and is_joined:
            self._now[w] += whole
            self._during(w, 0.0)
            again = sum((len(self._stages) - 1, i) in self._again for i in range(m))
            self._now[w] -= again * stage.output + (m - again) * stage.loose
        self._during(w, most * whole)
        self._now[w] += kept * whole

    def _r(self, w: int, j: int, i: int) -> None:
        stage = self._stages[j]
        if stage.at_once and w not in self._aside:
            self._during(w, stage.again)
            self._now[w] += stage.held - stage.stored
            self._free(w, j, i, "is_kept")
            self._during(w, 0.0)

    def _left(self, j: int) -> float:
        """The gradients of weights that a backward leaves behind; others are added to them."""
        self._backwards[j] += 1
        return self._stages[j].weights.trainable if self._backwards[j] == 1 else 0.0

    def _b(self, w: int, j: int, i: int) -> None:
        if w in self._aside:
            self._give_back(w, j, i)
            return
        stage, number = self._stages[j], self._backwards[j]
        is_within = (j, i) in self._again and not stage.at_once
        if self._is_summed:
            most = stage.whole[min(number, 1)]
        else:
            most = stage.adding(again=is_within)[min(number, 2)] + self._early(j)
        arrived = self._arrived(w, j, i)
        # A gradient that is a view holds more than the backward begins with.
        self._during(w, most - min(arrived, stage.given))
        self._now[w] += self._left(j) - arrived - (stage.stored if is_within else stage.held)
        self._free(w, j, i)
        self._give_back(w, j, i)

    def _arrived(self, w: int, j: int, i: int) -> float:
        """The gradients that have arrived at a cell, of which W of another one may keep some."""
        k, size = self._views.pop((j, i), (0, 0.0))
        if (k, i) in self._late:
            self._now[w] += size
            self._late[k, i] += size
        return self._grads.pop((j, i), 0.0)

    def _early(self, j: int) -> float:
        """The gradients that are there before they are due, of other micro-batches."""
        most = EARLY if j else EARLY_AT_FIRST
        others = min(most, self._m - 1 - self._backwards[j])
        return others * self._gets[j]

    def _i(self, w: int, j: int, i: int) -> None:
        stage, arrived = self._stages[j], self._arrived(w, j, i)
        half, pending, _ = stage.halves
        self._during(w, half - min(arrived, stage.given))
        # I lets go of what only I needed, but not of the input of a recomputation.
        is_again = (j, i) in self._again
        late = sum(
            self._waiting.get((j, x, i), 0.0)
            for _, x in self._in[j]
            if x.is_pending or (is_again and x.is_kept)
        )
        late += arrived if stage.waits else 0.0
        views = stage.views
        own = [k for k, x in self._in[j] if x.holds > x.gradient and self._placement[k] == w]
        if own and views:
            self._views[own[0], i] = j, views
            views = 0.0
        late += views
        self._late[j, i] = late
        for k, x in self._out[j]:
            # What W of another stage needs of this one stays for it.
            is_shared = self._placement[k] == w and self._keeps(j, is_again, x)
            if is_shared and x.is_pending and (k, i) in self._late and x.value not in stage.late:
                self._now[w] += x.size
                self._late[k, i] += x.size
        self._now[w] += pending + late - stage.held - arrived
        self._free(w, j, i)
        self._give_back(w, j, i, views)

    def _w(self, w: int, j: int, i: int) -> None:
        _, pending, weight = self._stages[j].halves
        self._during(w, weight[self._backwards[j] > 0])
        self._now[w] += self._left(j) - pending - self._late.pop((j, i), 0.0)

    def _give_back(self, w: int, j: int, i: int, kept: float = 0.0) -> None:
        """Send the gradients of what has arrived; all are there until then, and W keeps some."""
        rest = self._holds[j] - kept
        for source, x in self._in[j]:
            there = self._placement[source]
            if there != w:
                self._during(w, rest + x.gradient)
            if x.source >= 0:
                size = x.holds if there == w else x.gradient
                self._now[there] += size
                self._grads[source, i] = self._grads.get((source, i), 0.0) + size
                self._during(there, 0.0)


# Any model under a device map.


@dataclass(frozen=True)
class Footprint:
    """The memory of a model, whichever blocks a device has."""

    #: The record of the model, for one micro-batch.
    found: Record
    #: The weights of each block; under None those that belong to no block.
    weights: Mapping[str | None, Weights]
    chunks: int
    #: How many of them, from the first, are computed again.
    again: int
    #: Memory of the optimizer, for each byte of a parameter that it changes.
    state: float
    #: How its cells leave for the memory of the host, if they do.
    offload: Offload | None = None

    @cached_property
    def _own(self) -> dict[str | None, list[int]]:
        """The numbers of the sections of each block."""
        found: dict[str | None, list[int]] = {}
        for k, section in enumerate(self.found.sections):
            found.setdefault(section.block, []).append(k)
        return found

    @cached_property
    def _each(self) -> list[Weights]:
        """The weights of each section: those of a block are with its first one."""
        firsts = {own[0]: block for block, own in self._own.items()}
        nothing = Weights()
        return [
            self.weights.get(firsts[k], nothing) if k in firsts else nothing
            for k in range(len(self.found.sections))
        ]

    @cached_property
    def _stage(self) -> Callable[[range], Stage]:
        found = self.found
        if found.has_loss and found.fills_itself and self.again == self.chunks:
            # What the model returns beside its loss is not there.
            found = replace(found, values=[replace(x, output=0) for x in found.values])
        return cache(lambda own: Stage(found, self._each, own, by_call=True))

    def need(self, blocks: Collection[str | None]) -> tuple[float, float]:
        """Find the memory of a device with some blocks, and with None for all else.

        Returns:
            The most bytes, and those that leave of the cells of a micro-batch there.
        """
        own, found = {k for x in blocks for k in self._own.get(x, ())}, self.found
        stages, placement = [], []
        for is_own, visit in groupby(range(len(found.sections)), own.__contains__):
            numbers = [*visit]
            stages.append(self._stage(range(numbers[0], numbers[-1] + 1)))
            placement.append(0 if is_own else len(stages))
        # Blocks that are not called have weights all the same.
        idle = [self.weights[x] for x in blocks if x not in self._own and x in self.weights]
        leaves, each = self.offload, zip(placement, stages)
        away = [0.0 if w or not leaves else x.away(leaves.share) for w, x in each]
        step = StepMemory(
            self._order(placement),
            placement,
            stages,
            state=self.state,
            given=self.chunks * found.given,
            is_summed=False,
            loss=(INSIDE, ON_DEMAND)[found.fills_itself] if found.has_loss else CROSS_ENTROPY,
            away=away,
            ahead=[int(not w and leaves is not None) for w in placement],
            aside=range(1, 1 + len(stages)),
        )
        return sum(x.all + self.state * x.trainable for x in idle) + step.peaks()[0], sum(away)

    def _order(self, placement: Sequence[int]) -> Issued:
        """The order of the host, of whose threads each takes the backward that was recorded last.

        Autograd has a thread for each device, and one with little to do gets ahead. That changes
        peaks by less than 1 %, so it is not counted.
        """
        places = [*enumerate(placement)]
        order = [(w, j, "F", i) for i in range(self.chunks) for j, w in places]
        for i in reversed(range(self.chunks)):
            kinds = "RB" if i < self.again else "B"
            order += [(w, j, kind, i) for j, w in reversed(places) for kind in kinds]
        return Issued(order)


def weights_of(
    model: nn.Module, blocks: Mapping[str, nn.Module], own: Collection[str | None] | None = None
) -> dict[str | None, Weights]:
    """The memory of the weights of each block, and under None of what belongs to none.

    A weight that several blocks share counts for the last one of them, the first in backward. Of
    the blocks of one device, a weight whose home is another device comes as a copy, whose gradient
    leaves.
    """
    users: dict[Tensor, list[str | None]] = {}
    for name, module in (*blocks.items(), (None, model)):
        for x in {*module.parameters(), *module.buffers()}:
            users.setdefault(x, []).append(name)
    found: dict[str | None, Weights] = {}
    for x, names in users.items():
        # The home is the first of the deepest ones.
        home = max(names, key=lambda name: 0 if name is None else 1 + name.count("."))
        here = [name for name in names[:-1] if own is None or name in own]
        last, changed = here[-1] if here else None, x.nbytes if x.requires_grad else 0
        before = found.get(last, Weights())
        if own is None or home in own:
            found[last] = Weights(before.all + x.nbytes, before.trainable + changed)
        elif here:
            found[last] = Weights(before.all + x.nbytes + changed, before.trainable)
    return found
