"""The memory of a partition: what its cells keep, and the most that each kind of computation needs.

The sections of a partition are gone through in the order in which they run, forward and backward,
so that the memory of a cell is known where it is highest, and not only where it is kept. Values
that come from other partitions are told apart: where several are on one device, some need no
memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from torchgpipe.planner.record import GIVEN, Halved, Hop, Record, Section, Value

__all__: list[str] = ["Arrival", "Stage", "Weights", "known"]


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
        is_late: whether it is kept from I until W.
    """

    number: int
    size: float
    made: int
    last: int
    leaves: bool
    first_saver: int | None
    is_stored: bool
    is_slot: bool
    is_late: bool


class Stage:
    """The memory of one partition for micro-batches of some rows, in bytes, arrivals aside.

    Args:
        record: the record of the model.
        weights: those of each section.
        sections: the numbers of its sections, which follow each other.
        by_call: whether each call is computed again by itself, and not the partition as a whole.
    """

    def __init__(
        self,
        record: Record,
        weights: Sequence[Weights],
        sections: Sequence[int],
        *,
        by_call: bool = False,
    ) -> None:
        self.sections, self._all, self._by_call = sections, record, by_call
        self._sections = record.sections
        self._each = [weights[k] for k in sections]
        self._inside = range(sections[0], sections[-1] + 1)
        self._found: dict[str, dict[int | None, list[_Value]]] = {}
        self._values = [(n, record.values[n]) for n in record.touching(self._inside)]

    @cached_property
    def weights(self) -> Weights:
        """The memory of its weights."""
        all, trainable, small, _ = map(sum, zip(*self._each))
        return Weights(all, trainable, small, max(x.largest for x in self._each))

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """The values that it gets from others."""
        found: dict[tuple[int, Hop], Arrival] = {}
        for n, v in self._values:
            savers = v.savers & {*self._inside}
            for hop in v.hops:
                # What the caller gives is where the first partition is.
                is_there = hop.source == GIVEN and not self.sections[0]
                if hop.target not in self._inside or hop.source in self._inside or is_there:
                    continue
                key = n, hop._replace(target=0)
                size = max(v.users[hop.target], found[key].size if key in found else 0.0)
                holds = max(v.gradient, v.holds.get(hop.target, 0.0) if hop.is_skip else 0.0)
                ways = n, hop.source, hop.is_skip
                is_late = any(k in self._inside for k in v.late)
                found[key] = Arrival(*ways, size, v.gradient, holds, bool(savers), is_late)
        return [*found.values()]

    @cached_property
    def leaving(self) -> dict[int, float]:
        """By value, the bytes of what goes to others, if nothing keeps it."""
        return {x.number: x.size for x in self._made if self._leaves_to_others(x.number)}

    @cached_property
    def kept(self) -> frozenset[int]:
        """The numbers of the values that are kept for backward."""
        return frozenset(x.number for x in self._made if x.first_saver is not None)

    @cached_property
    def late(self) -> frozenset[int]:
        """The numbers of the values that are kept for W."""
        return frozenset(x.number for x in self._made if x.is_late)

    @cached_property
    def output(self) -> float:
        """The bytes that the caller gets of a micro-batch."""
        return sum(self._all.values[x.number].output for x in self._made)

    @cached_property
    def loose(self) -> float:
        """The bytes of them that nothing keeps."""
        own = [x for x in self._made if x.first_saver is None]
        return sum(x.size for x in own if self._all.values[x.number].output)

    @cached_property
    def held(self) -> float:
        """The bytes that a cell keeps from F, or from R, until its backward."""
        values = sum(x.size for x in self._made if x.first_saver is not None)
        return values + sum(self._sections[k].kept for k in self.sections)

    @cached_property
    def stored(self) -> float:
        """The bytes that a cell keeps from F until R."""
        values = sum(x.size for x in self._made if x.is_stored)
        return values + sum(self._sections[k].kept for k in self.sections if not self._repeats(k))

    @cached_property
    def forward(self) -> tuple[float, float]:
        """The most during F, above that before, and of an F whose cell is computed again."""
        return self._forward(), self._forward(keeps=False)

    @cached_property
    def again(self) -> float:
        """The same of R."""
        return self._forward(again=True)

    @cached_property
    def saver(self) -> int | None:
        """The last section that saves what a recomputation has to make; None if there is none."""
        saved = {k for x in self._made for k in self._savers(x.number)}
        saved |= {k for k in self.sections if self._sections[k].kept}
        return max(saved, default=None)

    @cached_property
    def at_once(self) -> bool:
        """Whether all of a cell is computed again before its backward begins."""
        return bool(self._leaving) or not self._by_call

    @cached_property
    def given(self) -> float:
        """The gradients that a backward begins with."""
        return sum(self._leaving.values())

    @cached_property
    def whole(self) -> Sequence[float]:
        """The most of the first B, of the second, and of a later one, with these gradients."""
        trainable = [float(x.trainable) for x in self._each]
        small = [float(x.small) for x in self._each]
        return (
            self._backward(lambda x: x.held.first, lambda x: x.free.first, trainable),
            self._backward(lambda x: x.held.second, lambda x: x.free.second, small),
            self._backward(lambda x: x.held.later, lambda x: x.free.later, small),
        )

    @cached_property
    def adding(self) -> Sequence[float]:
        """The same of autograd's backward, of the first micro-batch, and so on."""
        return self._adding(again=False)

    @cached_property
    def adding_again(self) -> Sequence[float]:
        """The same of cells that are computed again within it."""
        return self._adding(again=True)

    @cached_property
    def waits(self) -> bool:
        """Whether I does nothing, as the input needs no gradient, and keeps those that arrive."""
        return not any(x.gradient for x in self.arrivals)

    @cached_property
    def views(self) -> float:
        """The gradients of skips among what it gives back whose memory W needs, too."""
        found = 0.0
        for source, k, _ in (hop for _, v in self._values for hop in v.hops if not hop.is_skip):
            if source in self._inside and k in self._inside and self._sections[k].rest == 0:
                half = self._sections[source].halves
                is_noted = half is not None and half.notes_output
                found += is_noted * sum(x.holds.get(k, 0.0) for _, x in self._values)
        return found

    def _repeats(self, k: int) -> bool:
        """Whether a section is computed again: a call, and the code after the last one."""
        return self._sections[k].is_call or k + 1 == len(self._sections)

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
            elif v.output and self.sections[-1] + 1 == len(self._sections):
                found[n, self.sections[-1], False] = v.gradient
        return found

    def _leaves_to_others(self, n: int) -> bool:
        v = self._all.values[n]
        return any(x.source in self._inside and x.target not in self._inside for x in v.hops)

    @cached_property
    def _made(self) -> list[_Value]:
        return [self._made_one(n, v) for n, v in self._values if v.made in self._inside]

    def _made_one(self, n: int, v: Value) -> _Value:
        used = [k for k in v.users if k in self._inside]
        savers = self._savers(n)
        # What takes no part in backward, as frozen blocks at the beginning, is not computed again.
        stored = any(self._sections[k].is_call and self._sections[k].free.first for k in used)
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
            any(k in self._inside for k in v.late),
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
            again: whether it is the recomputation, which ends at the last tensor that it saves.
        """
        level = peak = 0.0
        for k in self.sections:
            section = self._sections[k]
            is_end = again and k == self.sections[-1]
            peak = max(peak, level + (section.again if is_end else section.forward))
            level += section.kept if keeps or not self._repeats(k) else 0.0
            level += sum(x.size for x in self._at("made").get(k, ()))
            gone = self._at("last").get(k, ())
            level -= sum(x.size for x in gone if not self._stays(x, keeps))
        return peak

    def _gradient(self, v: Value, k: int, *, is_skip: bool) -> float:
        """The memory that the gradient of a value holds after the backward of a section."""
        if is_skip:
            return v.holds.get(k, v.gradient)
        rest = self._sections[k].rest
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
                if k in self._inside and not (source == GIVEN and not self.sections[0]):
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
        """The memory that a recomputation of a section leaves behind."""
        if not self._repeats(k):
            return 0.0
        made = self._at("made").get(k, ())
        return self._sections[k].kept + sum(
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
        level = peak = self.given
        for k, more in zip(reversed(self.sections), reversed(stay)):
            section, outer = self._sections[k], self._gone_out.get(k, 0.0)
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

    def _adding(self, *, again: bool) -> Sequence[float]:
        trainable, none = [float(x.trainable) for x in self._each], [0.0] * len(self.sections)
        second = "adding" if self._by_call else "summing"
        return (
            self._backward(None, lambda x: x.free.first, trainable, again=again),
            self._backward(None, lambda x: getattr(x.free, second), none, again=again),
            self._backward(None, lambda x: x.free.adding, none, again=again),
        )

    @cached_property
    def halves(self) -> tuple[float, float, Sequence[float]]:
        """The most during I, with these gradients, what a cell keeps from I until W, and W.

        The last is the most of the first W, of the second, and of a later one, above that before.
        """
        halves = [self._sections[k].halves for k in self.sections]
        if any(x is None for x in halves):
            return 0.0, 0.0, [0.0] * 3
        if self.waits:
            # W does the whole backward, and begins with the gradients in memory.
            return self.given, self.held, [x - self.given for x in self.whole]
        made, gone, used = self._passed
        level = peak = self.given
        pending = sum(x.size for x in self._made if x.is_late)
        for k, half in zip(reversed(self.sections), reversed(halves)):
            assert half is not None
            out, outer = used.get(k, 0.0), self._gone_out.get(k, 0.0)
            peak = max(peak, level - out - outer + (half.held if outer else half.free))
            level += made.get(k, 0.0) + half.noted
            pending += half.pending
            if half.notes_output:
                pending += gone.get(k, 0.0) + outer
            else:
                level -= gone.get(k, 0.0)
        # The gradients of all weights are there before they are added to the sums.
        sums = [*accumulate((x.trainable for x in self._each), initial=0)]
        late = max(x + y.weight for x, y in zip(sums, halves) if y is not None)
        return peak, pending, [late] * 3

    def _savers(self, n: int) -> list[int]:
        return [k for k in self._all.values[n].savers if k in self._inside]


def known(section: int, held: float, stored: float) -> Stage:
    """The partition of one section, of which only what a cell keeps is known.

    Args:
        section: the number of the section.
        held: what it keeps from F, or from R, until its backward.
        stored: what it keeps from F until R.
    """
    count = section + 1
    record = Record([Section(None, True, halves=Halved())] * count, [])
    found = Stage(record, [Weights()] * count, (section,))
    # Each figure is found once, and these are.
    vars(found).update(held=held, stored=stored)
    return found
