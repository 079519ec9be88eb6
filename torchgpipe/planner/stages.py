"""The memory of a partition: what its cells keep, and the most that each kind of computation needs.

The sections of a partition are gone through in the order in which they run, forward and backward,
so that the memory of a cell is known where it is highest, and not only where it is kept. Values
that come from other partitions are told apart: where several are on one device, some need no
memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from torchgpipe.planner.record import GIVEN, Hop, Record, Section, Value

__all__ = ["Arrival", "Stage", "Weights", "known", "stage_of"]


class Weights(NamedTuple):
    """The memory of the weights of a layer or block.

    Attributes:
        all: the bytes of its parameters and buffers.
        trainable: those of the parameters that get a gradient.
        small: those of them whose gradients wait for the end of a backward, to be added.
        largest: those of the largest one.
    """

    all: int = 0
    trainable: int = 0
    small: int = 0
    largest: int = 0


class Arrival(NamedTuple):
    """A value that a partition gets from another one.

    Attributes:
        value: the number of the value.
        source: the section that it comes from.
        is_skip: whether it comes as a skip.
        size: its bytes.
        gradient: the bytes of its gradient.
        holds: the bytes that its gradient holds where it is made.
        is_kept: whether cells keep it for backward.
        is_pending: whether they keep it for W.
    """

    value: int
    source: int
    is_skip: bool
    size: float
    gradient: float
    holds: float
    is_kept: bool
    is_pending: bool


@dataclass(frozen=True)
class Stage:
    """The memory of one partition for micro-batches of some rows, in bytes, arrivals aside.

    Args:
        sections: its sections.
        arrivals: what it gets from others.
        leaving: by value, the bytes of what goes to others, if nothing keeps it.
        kept: the numbers of the values that are kept for backward.
        output: the bytes that the caller gets of a micro-batch.
        loose: those of them that nothing keeps.
        held: what a cell keeps from F, or from R, until its backward.
        stored: what a cell keeps from F until R.
        pending: what a cell keeps from I until W.
        forward: the most during F, above that before, and of an F whose cell is computed again.
        again: likewise of R.
        saver: the last section that saves what a second run has to make; None if there is none.
        at_once: whether all of a cell is computed again before its backward begins.
        given: the gradients that a backward begins with.
        whole: the most of the first B, of the second, and of a later one, with these gradients.
        adding: likewise of autograd's backward, of the first micro-batch, and so on.
        adding_again: likewise of cells that are computed again within it.
        half: likewise of I.
        weight: the most of the first W, of the second, and of a later one, above that before.
        weights: the memory of its weights.
    """

    sections: Sequence[int]
    arrivals: Sequence[Arrival]
    leaving: Mapping[int, float]
    kept: frozenset[int]
    output: float
    loose: float
    held: float
    stored: float
    pending: float
    forward: tuple[float, float]
    again: float
    saver: int | None
    at_once: bool
    given: float
    whole: Sequence[float]
    adding: Sequence[float]
    adding_again: Sequence[float]
    half: float
    weight: Sequence[float]
    weights: Weights


def stage_of(
    record: Record,
    weights: Sequence[Weights],
    sections: Sequence[int],
    *,
    by_call: bool = False,
) -> Stage:
    """Put sections together to a partition.

    Args:
        record: the record of the model.
        weights: those of each section.
        sections: the numbers of the sections, which follow each other.
        by_call: whether each call is computed again by itself, and not the partition as a whole.
    """
    return _Partition(record, weights, sections, by_call).stage()


def known(section: int, held: float, stored: float) -> Stage:
    """The partition of one section, of which only what cells keep is known.

    Args:
        section: the number of the section.
        held: what a cell keeps from F, or from R, until its backward.
        stored: what it keeps from F until R.
    """
    none = (0.0,) * 3
    return Stage(
        *((section,), (), {}, frozenset(), 0.0, 0.0, held, stored, held, none[:2], 0.0, None),
        *(True, 0.0, none, none, none, 0.0, none, Weights()),
    )


class _Value(NamedTuple):
    """A value that a partition makes.

    Attributes:
        number: its number.
        size: its bytes.
        made: the section that makes it.
        last: the last section that uses it here.
        leaves: whether others, or the caller, get it.
        first_saver: the first section here that keeps it for backward; None if there is none.
        is_stored: whether it is kept where sections are computed again.
        is_slot: whether it is made a second time then.
    """

    number: int
    size: float
    made: int
    last: int
    leaves: bool
    first_saver: int | None
    is_stored: bool
    is_slot: bool


class _Partition:
    def __init__(
        self, record: Record, weights: Sequence[Weights], own: Sequence[int], by_call: bool
    ) -> None:
        self._all, self._weights, self._own, self._by_call = record, weights, own, by_call
        self._inside = range(own[0], own[-1] + 1)
        self._found: dict[str, dict[int | None, list[_Value]]] = {}
        self._values = [(n, record.values[n]) for n in record.touching(self._inside)]

    def stage(self) -> Stage:
        own = [self._weights[k] for k in self._own]
        held = sum(x.size for x in self._made if x.first_saver is not None)
        held += sum(self._section(k).kept for k in self._own)
        stored = sum(x.size for x in self._made if x.is_stored)
        stored += sum(self._section(k).kept for k in self._own if not self._repeats(k))
        trainable = [float(x.trainable) for x in own]
        small = [float(x.small) for x in own]
        none = [0.0] * len(own)
        whole = [
            self._backward(lambda x: x.held.first, lambda x: x.free.first, trainable),
            self._backward(lambda x: x.held.second, lambda x: x.free.second, small),
            self._backward(lambda x: x.held.later, lambda x: x.free.later, small),
        ]
        adding, adding_again = (
            [
                self._backward(None, lambda x: x.free.first, trainable, again=again),
                self._backward(
                    None,
                    lambda x: x.free.adding if self._by_call else x.free.summing,
                    none,
                    again=again,
                ),
                self._backward(None, lambda x: x.free.adding, none, again=again),
            ]
            for again in (False, self._by_call and not self._leaving)
        )
        half, pending, weight = self._halves(held, whole)
        outputs = [(x, v) for x in self._made if (v := self._all.values[x.number]).output]
        return Stage(
            self._own,
            self._arrivals,
            {x.number: x.size for x in self._made if self._leaves_to_others(x.number)},
            frozenset(x.number for x in self._made if x.first_saver is not None),
            sum(v.output for _, v in outputs),
            sum(x.size for x, _ in outputs if x.first_saver is None),
            held,
            stored,
            pending,
            (self._forward(), self._forward(keeps=False)),
            self._forward(again=True),
            self._saver(),
            bool(self._leaving) or not self._by_call,
            self._given,
            whole,
            adding,
            adding_again,
            half,
            weight,
            Weights(
                sum(x.all for x in own),
                sum(x.trainable for x in own),
                sum(x.small for x in own),
                max(x.largest for x in own),
            ),
        )

    def _saver(self) -> int | None:
        saved = {k for x in self._made for k in self._savers(x.number)}
        saved |= {k for k in self._own if self._section(k).kept}
        return max(saved, default=None)

    def _repeats(self, k: int) -> bool:
        """Whether a section is computed again: a call, and the code behind the last one."""
        return self._section(k).is_call or k + 1 == len(self._all.sections)

    def _section(self, k: int) -> Section:
        return self._all.sections[k]

    @cached_property
    def _arrivals(self) -> list[Arrival]:
        found: dict[tuple[int, Hop], Arrival] = {}
        for n, v in self._values:
            savers = v.savers & {*self._inside}
            is_pending = any(self._weights[x].trainable for x in savers)
            for hop in v.hops:
                # What the caller gives is where the first partition is.
                is_there = hop.source == GIVEN and not self._own[0]
                if hop.target not in self._inside or hop.source in self._inside or is_there:
                    continue
                key = n, hop._replace(target=0)
                size = max(v.users[hop.target], found[key].size if key in found else 0.0)
                holds = max(v.gradient, v.holds.get(hop.target, 0.0) if hop.is_skip else 0.0)
                ways = n, hop.source, hop.is_skip
                found[key] = Arrival(*ways, size, v.gradient, holds, bool(savers), is_pending)
        return [*found.values()]

    @cached_property
    def _leaving(self) -> dict[tuple[int, int, bool], float]:
        """The gradients of what goes to others, or to the caller, by value and hop."""
        found = {}
        for n, v in self._values:
            for hop in v.hops:
                if hop.source in self._inside and hop.target not in self._inside:
                    found[n, hop.source, hop.is_skip] = v.gradient
            if self._all.has_loss:
                continue
            if v.output and v.made in self._inside:
                found[n, v.made, False] = v.gradient
            elif v.output and self._own[-1] + 1 == len(self._all.sections):
                found[n, self._own[-1], False] = v.gradient
        return found

    def _leaves_to_others(self, n: int) -> bool:
        v = self._all.values[n]
        return any(x.source in self._inside and x.target not in self._inside for x in v.hops)

    @cached_property
    def _given(self) -> float:
        return sum(self._leaving.values())

    @cached_property
    def _made(self) -> list[_Value]:
        return [self._made_one(n, v) for n, v in self._values if v.made in self._inside]

    def _made_one(self, n: int, v: Value) -> _Value:
        used = [k for k in v.users if k in self._inside]
        savers = self._savers(n)
        # What takes no part in backward, as frozen blocks at the beginning, is not computed again.
        stored = any(self._section(k).is_call and self._section(k).free.first for k in used)
        stored = stored or any(not self._repeats(k) for k in savers)
        return _Value(
            n,
            v.size,
            v.made,
            max([v.made, *used]),
            bool(v.output) or self._leaves_to_others(n),
            min(savers) if savers else None,
            self._by_call and stored,
            self._repeats(v.made) and v.made in savers,
        )

    def _at(self, key: str) -> dict[int | None, list[_Value]]:
        """The values by the section that makes them, that uses them last, or that keeps them."""
        if key not in self._found:
            found = self._found[key] = {}
            for x in self._made:
                found.setdefault(getattr(x, key), []).append(x)
        return self._found[key]

    def _stays(self, x: _Value, keeps: bool) -> bool:
        return x.leaves or (x.first_saver is not None if keeps else x.is_stored)

    def _forward(self, *, keeps: bool = True, again: bool = False) -> float:
        """The most memory during a forward, above that before.

        Args:
            keeps: whether something is kept for backward.
            again: whether it is the second run, which ends at the last tensor that it saves.
        """
        level = peak = 0.0
        for k in self._own:
            section = self._section(k)
            is_end = again and k == self._own[-1]
            peak = max(peak, level + (section.again if is_end else section.forward))
            level += section.kept if keeps or not self._repeats(k) else 0.0
            level += sum(x.size for x in self._at("made").get(k, ()))
            gone = self._at("last").get(k, ())
            level -= sum(x.size for x in gone if not self._stays(x, keeps))
        return peak

    def _gradient(self, v: Value, k: int, *, is_skip: bool) -> float:
        """The memory that the gradient of a value holds behind the backward of a section."""
        if is_skip:
            return v.holds.get(k, v.gradient)
        rest = self._section(k).rest
        return v.gradient if rest is None else min(rest, v.gradient)

    @cached_property
    def _passed(self) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """The gradients between sections, by the one that makes them, and the one that gets them.

        The last are those of what a section gets, as the section itself counts them.
        """
        made: dict[int, float] = {}
        gone: dict[int, float] = {}
        used: dict[int, float] = {}
        for n, v in self._values:
            ends: dict[tuple[int, bool], int] = {}
            for source, k, is_skip in v.hops:
                if k in self._inside and not (source == GIVEN and not self._own[0]):
                    ends[source, is_skip] = max(k, ends.get((source, is_skip), k))
            for (source, is_skip), k in ends.items():
                # What goes to others, too, has its gradient before.
                if (n, source, is_skip) not in self._leaving:
                    size = self._gradient(v, k, is_skip=is_skip)
                    made[k] = made.get(k, 0.0) + size
                    gone[source] = gone.get(source, 0.0) + size
                    used[source] = used.get(source, 0.0) + v.gradient
        return made, gone, used

    @cached_property
    def _gone_out(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for (_, source, _), size in self._leaving.items():
            found[source] = found.get(source, 0.0) + size
        return found

    def _second(self, k: int) -> float:
        """The memory that a second run of a section leaves behind."""
        if not self._repeats(k):
            return 0.0
        made = self._at("made").get(k, ())
        return self._section(k).kept + sum(
            x.size for x in made if x.first_saver is not None and (not x.is_stored or x.is_slot)
        )

    def _backward(
        self,
        held: Callable[[Section], float] | None,
        free: Callable[[Section], float],
        stay: Sequence[float],
        *,
        again: bool = False,
    ) -> float:
        """The most memory during a backward, above that before, with the gradients of the output.

        Args:
            held: the most of a section whose gradients of outputs are held; None if none are.
            free: that of others.
            stay: the memory of the gradients of each section's weights that stay until the end.
            again: whether sections are computed again as backward comes to them.
        """
        made, gone, used = self._passed
        level = peak = self._given
        for k, more in zip(reversed(self._own), reversed(stay)):
            section, outer = self._section(k), self._gone_out.get(k, 0.0)
            if again and self._repeats(k):
                peak = max(peak, level + section.forward)
                level += self._second(k)
            is_held = held is not None and outer > 0
            most = held(section) if held is not None and is_held else free(section)
            peak = max(peak, level - section.kept - used.get(k, 0.0) - outer + most)
            level -= section.kept + gone.get(k, 0.0) + (0.0 if is_held else outer)
            level -= sum(x.size for x in self._at("first_saver").get(k, ()))
            level += made.get(k, 0.0) + more
            peak = max(peak, level)
        return peak

    def _halves(self, kept: float, whole: Sequence[float]) -> tuple[float, float, list[float]]:
        """The most memory during I, what is kept from I until W, and the most during W."""
        halves = [self._section(k).halves for k in self._own]
        if any(x is None for x in halves):
            return 0.0, 0.0, [0.0] * 3
        if not any(x.gradient for x in self._arrivals):
            # The input needs no gradient. So I only keeps the gradient of the output for W, which
            # does the whole backward, and begins with that gradient in memory.
            return self._given, kept + self._given, [x - self._given for x in whole]
        made, gone, used = self._passed
        level = peak = self._given
        for k, half in zip(reversed(self._own), reversed(halves)):
            assert half is not None
            out, outer = used.get(k, 0.0), self._gone_out.get(k, 0.0)
            peak = max(peak, level - out - outer + (half.held if outer else half.free))
            level += made.get(k, 0.0) + half.noted
            level -= 0.0 if half.notes_output else gone.get(k, 0.0)
        weights = [self._weights[k] for k in self._own]
        pending = sum(x.pending for x in halves if x is not None) + sum(
            x.size
            for x in self._made
            if any(self._weights[k].trainable for k in self._savers(x.number) if k != x.made)
        )
        # The gradients of all weights are there before they are added to the sums. The second W
        # makes the first sum: a new tensor, since a gradient that came alone may be shared.
        sums = [*accumulate((x.trainable for x in weights), initial=0)]
        late = max(x + y.weight for x, y in zip(sums, halves) if y is not None)
        large = max((x.largest for x in weights if x.small < x.trainable), default=0)
        return peak, pending, [late, max(late, sums[-1] + large), late]

    def _savers(self, n: int) -> list[int]:
        return [k for k in self._all.values[n].savers if k in self._inside]
