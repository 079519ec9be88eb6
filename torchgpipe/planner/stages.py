"""The memory of a partition: what its cells keep, and the most that each kind of computation needs.

The sections of a partition are gone through in the order in which they run, forward and backward,
so that the memory of a cell is known where it is highest, and not only where it is kept. Values
that come from other partitions are told apart: where several are on one device, some need no
memory of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from torchgpipe.planner.record import GIVEN, Halved, Hop, Record, Section, Value

__all__: list[str] = ["Arrival", "Stage", "Weights", "known"]


class Weights(NamedTuple):
    """The memory of the weights of a layer or block.

    Attributes:
        all: the bytes of its parameters and buffers.
        trainable: those of the parameters that get a gradient.
        small: those of them whose gradients wait for the end of a backward, to be added.
    """

    all: int = 0
    trainable: int = 0
    small: int = 0


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


#: The number of a value, the value, and one of its ways.
_Way: TypeAlias = tuple[int, Value, Hop]


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
        return Weights(*map(sum, zip(*self._each)))

    @cached_property
    def _hops(self) -> tuple[list[_Way], list[_Way], list[_Way]]:
        """The ways of values from others, to others, and between its sections."""
        arriving: list[_Way] = []
        leaving: list[_Way] = []
        within: list[_Way] = []
        for n, v in self._values:
            for hop in v.hops:
                if hop.target not in self._inside:
                    if hop.source in self._inside:
                        leaving.append((n, v, hop))
                elif hop.source in self._inside:
                    within.append((n, v, hop))
                elif hop.source != GIVEN or self.sections[0]:
                    # What the caller gives is where the first partition is.
                    arriving.append((n, v, hop))
        return arriving, leaving, within

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """The values that it gets from others."""
        found: dict[tuple[int, Hop], Arrival] = {}
        for n, v, hop in self._hops[0]:
            key = n, hop._replace(target=0)
            size = max(v.users[hop.target], found[key].size if key in found else 0.0)
            holds = max(v.gradient, v.holds.get(hop.target, 0.0) if hop.is_skip else 0.0)
            is_kept, is_late = (not x.isdisjoint(self._inside) for x in (v.savers, v.late))
            ways = n, hop.source, hop.is_skip
            found[key] = Arrival(*ways, size, v.gradient, holds, is_kept, is_late)
        return [*found.values()]

    @cached_property
    def leaving(self) -> dict[int, float]:
        """By value, the bytes of what goes to others, if nothing keeps it."""
        return {n: v.size for n, v, _ in self._hops[1] if v.made in self._inside}

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
        """The most of the first B, and of a later one, with these gradients."""
        return [self._backward(x, holds=True) for x in ("first", "later")]

    @cached_property
    def adding(self) -> Sequence[float]:
        """The same of autograd's backward, of the first, of the second, and of a later one."""
        return self._adding(again=False)

    @cached_property
    def adding_again(self) -> Sequence[float]:
        """The same of cells that are computed again within it."""
        return self._adding(again=True)

    def _adding(self, *, again: bool) -> Sequence[float]:
        ways = "first", "adding" if self._by_call else "summing", "adding"
        return [self._backward(x, holds=False, again=again) for x in ways]

    @cached_property
    def waits(self) -> bool:
        """Whether I does nothing, as the input needs no gradient, and keeps those that arrive."""
        return not any(x.gradient for x in self.arrivals)

    @cached_property
    def views(self) -> float:
        """The gradients of skips among what it gives back whose memory W needs, too."""
        found = 0.0
        for _, _, (source, k, is_skip) in self._hops[2]:
            if not is_skip and self._sections[k].rest == 0:
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
        found = {(n, x.source, x.is_skip): v.gradient for n, v, x in self._hops[1]}
        for n, v in () if self._all.has_loss else self._values:
            if v.output and v.made in self._inside:
                found[n, v.made, False] = v.gradient
            elif v.output and self.sections[-1] + 1 == len(self._sections):
                found[n, self.sections[-1], False] = v.gradient
        return found

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
            bool(v.output) or n in self.leaving,
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
    def _passed(self) -> Sequence[dict[int, float]]:
        """The gradients between sections, by the one that makes them, and the one that gets them.

        The last are those of what a section gets, as the section itself counts them.
        """
        made, gone, used = found = [defaultdict[int, float](float) for _ in range(3)]
        ends: dict[tuple[int, int, bool], int] = {}
        for n, _, (source, k, is_skip) in (*self._hops[0], *self._hops[2]):
            ends[n, source, is_skip] = max(k, ends.get((n, source, is_skip), k))
        for (n, source, is_skip), k in ends.items():
            # What goes to others, too, has its gradient before.
            if (n, source, is_skip) not in self._leaving:
                v = self._all.values[n]
                size = self._gradient(v, k, is_skip=is_skip)
                made[k] += size
                gone[source] += size
                used[source] += v.gradient
        return found

    @cached_property
    def _gone_out(self) -> dict[int, float]:
        found = defaultdict[int, float](float)
        for (_, source, _), size in self._leaving.items():
            found[source] += size
        return found

    def _second(self, k: int) -> float:
        """The memory that a recomputation of a section leaves behind."""
        if not self._repeats(k):
            return 0.0
        made = self._at("made").get(k, ())
        return self._sections[k].kept + sum(
            x.size for x in made if x.first_saver is not None and (not x.is_stored or x.is_slot)
        )

    def _backward(self, way: str, *, holds: bool, again: bool = False) -> float:
        """The most memory during a backward, above that before, with the gradients of the output.

        Args:
            way: which of :class:`~torchgpipe.planner.record.Peaks`.
            holds: whether the gradients of the output stay to the end.
            again: whether sections are computed again as backward comes to them.
        """
        made, gone, used = self._passed
        stay = {"first": "trainable", "later": "small"}.get(way)
        level = peak = self.given
        for k, weights in zip(reversed(self.sections), reversed(self._each)):
            section, outer = self._sections[k], self._gone_out[k]
            if again and self._repeats(k):
                peak = max(peak, level + section.forward)
                level += self._second(k)
            is_held = holds and outer > 0
            most = getattr(section.held if is_held else section.free, way)
            peak = max(peak, level - section.kept - used[k] - outer + most)
            level -= section.kept + gone[k] + (0.0 if is_held else outer)
            level -= sum(x.size for x in self._at("first_saver").get(k, ()))
            level += made[k] + (getattr(weights, stay) if stay else 0.0)
            peak = max(peak, level)
        return peak

    @cached_property
    def halves(self) -> tuple[float, float, Sequence[float]]:
        """The most during I, with these gradients, what a cell keeps from I until W, and W.

        The last is the most of the first W, and of a later one, above that before.
        """
        halves = [self._sections[k].halves for k in self.sections]
        if any(x is None for x in halves):
            return 0.0, 0.0, [0.0] * 2
        if self.waits:
            # W does the whole backward, and begins with the gradients in memory.
            return self.given, self.held, [x - self.given for x in self.whole]
        made, gone, used = self._passed
        level = peak = self.given
        pending = sum(x.size for x in self._made if x.is_late)
        for k, half in zip(reversed(self.sections), reversed(halves)):
            assert half is not None
            out, outer = used[k], self._gone_out[k]
            peak = max(peak, level - out - outer + (half.held if outer else half.free))
            level += made[k] + half.noted
            pending += half.pending
            if half.notes_output:
                pending += gone[k] + outer
            else:
                level -= gone[k]
        # The gradients of all weights are there before they are added to the sums.
        sums = [*accumulate((x.trainable for x in self._each), initial=0)]
        late = max(x + y.weight for x, y in zip(sums, halves) if y is not None)
        return peak, pending, [late] * 2

    def _savers(self, n: int) -> list[int]:
        return [k for k in self._all.values[n].savers if k in self._inside]


def known(held: Sequence[float], stored: Sequence[float]) -> list[Stage]:
    """The partitions of which only what each cell keeps is known.

    Args:
        held: what it keeps from F, or from R, until its backward.
        stored: what of it stays from F until R.
    """
    sections = []
    for whole, own in zip(held, stored):
        # What is no call is not computed again.
        sections.append(Section(None, False, kept=own, halves=Halved()))
        sections.append(Section("", True, kept=whole - own, halves=Halved()))
    record, none = Record(sections, []), [Weights()] * len(sections)
    return [Stage(record, none, range(k, k + 2)) for k in range(0, len(sections), 2)]
