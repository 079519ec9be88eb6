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
from operator import itemgetter
from typing import NamedTuple

from torchgpipe.planner.record import GIVEN, Hop, Record, Value
from torchgpipe.recompute.storage import LEAST

__all__: list[str] = []


class Weights(NamedTuple):
    """The bytes of the weights of a layer or block."""

    all: int = 0
    #: Of the parameters that get a gradient.
    trainable: int = 0
    #: Of those whose gradients wait for the end of a backward, to be added.
    small: int = 0


class Arrival(NamedTuple):
    """A value that a partition gets from another one."""

    value: int
    #: The section that it comes from.
    source: int
    is_skip: bool
    size: float
    #: The bytes of its gradient.
    gradient: float
    #: The bytes that its gradient holds where it is made.
    holds: float
    #: Whether cells keep it for backward.
    is_kept: bool
    #: Whether they keep it for W.
    is_pending: bool
    #: Whether those that are computed again keep it: not if only code between calls uses it.
    is_stored: bool


class Stage:
    """The memory of one partition for micro-batches of some rows, in bytes, arrivals aside.

    Args:
        sections: the numbers of its sections, which follow each other.
        by_call: whether each call is computed again by itself, and not the partition as a whole.
    """

    def __init__(
        self, record: Record, weights: Sequence[Weights], sections: range, *, by_call: bool = False
    ) -> None:
        self.sections, self._all, self._by_call = sections, record, by_call
        self._sections = record.sections
        self._adding: dict[bool, Sequence[float]] = {}
        self._each = [weights[k] for k in sections]
        self.weights = Weights(*map(sum, zip(*self._each)))
        self._values = own = [(n, record.values[n]) for n in record.touching(sections)]
        #: The ways of values, by whether they lead from one of its sections, and to one.
        ways = defaultdict[tuple[bool, bool], list[tuple[int, Value, Hop]]](list)
        for n, v in own:
            for x in v.hops:
                # What the caller gives is where the first partition is.
                if x.source != GIVEN or sections[0]:
                    ways[x.source in sections, x.target in sections].append((n, v, x))
        self._arriving, self._within, leaving = (
            ways[x] for x in ((False, True), (True, True), (True, False))
        )
        #: By value, the bytes of what goes to others, if nothing keeps it.
        self.leaving = {n: v.size for n, v, _ in leaving if v.made in sections}
        #: The numbers of the values that are kept for backward, and of those for W.
        self.kept, self.late = set[int](), set[int]()
        #: The bytes that the caller gets of a micro-batch, and of what of it nothing keeps.
        self.output = self.loose = 0.0
        #: The bytes that a cell keeps from F, or from R, until its backward; and from F until R.
        self.held = self.stored = 0.0
        #: By the section, the bytes of values that it makes, that it uses last and that go then, if
        #: something is kept for backward or not, that it is the first to keep, and that a
        #: recomputation makes again.
        self._makes, self._ends, self._drops, self._saves, self._remakes = (
            defaultdict[int, float](float) for _ in range(5)
        )
        self._pending = 0.0
        for n, v in own:
            if v.made in sections:
                self._add(n, v)
        self.held += sum(self._sections[k].kept for k in sections)
        self.stored += sum(self._sections[k].kept for k in sections if not self._repeats(k))
        again = (self._sections[k] for k in sections)
        self.stored += sum(x.clones for x in again if x.free.first)
        #: The gradients of what goes to others, or to the caller, by value and hop.
        self._out = {(n, x.source, x.is_skip): v.gradient for n, v, x in leaving}
        for n, v in () if record.has_loss else own:
            if v.output and v.made in sections:
                self._out[n, v.made, False] = v.gradient
            elif v.output and sections.stop == len(self._sections):
                self._out[n, sections[-1], False] = v.gradient
        #: The gradients that a backward begins with.
        self.given = sum(self._out.values())

    def _add(self, n: int, v: Value) -> None:
        """Count a value that a section makes."""
        used, savers = ([k for k in x if k in self.sections] for x in (v.users, v.savers))
        # What takes no part in backward, as frozen blocks at the beginning, is not computed again.
        calls = (x for x in (self._sections[k] for k in used) if x.is_call and not x.clones)
        stored = any(x.free.first for x in calls)
        stored = self._by_call and (stored or any(not self._repeats(k) for k in savers))
        last, leaves = max([v.made, *used]), bool(v.output) or n in self.leaving
        self.output += v.output
        self._makes[v.made] += v.size
        self._ends[last] += 0.0 if leaves or savers else v.size
        self._drops[last] += 0.0 if leaves or stored else v.size
        self.stored += v.size if stored else 0.0
        if savers:
            self.kept.add(n)
            self.held += v.size
            self._saves[min(savers)] += v.size
            # A slot is made a second time, whatever is stored.
            is_slot = self._repeats(v.made) and v.made in savers
            self._remakes[v.made] += v.size if is_slot or not stored else 0.0
        elif v.output:
            self.loose += v.size
        if any(k in self.sections for k in v.late):
            self.late.add(n)
            self._pending += v.size

    def _repeats(self, k: int) -> bool:
        """Whether a section is computed again: a call, and the code after the last one."""
        return self._sections[k].is_call or k + 1 == len(self._sections)

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """The values that it gets from others."""
        found: dict[tuple[int, Hop], Arrival] = {}
        for n, v, hop in self._arriving:
            key = n, hop._replace(target=0)
            size = max(v.users[hop.target], found[key].size if key in found else 0.0)
            holds = max(v.gradient, v.holds.get(hop.target, 0.0) if hop.is_skip else 0.0)
            is_kept, is_late = (not x.isdisjoint(self.sections) for x in (v.savers, v.late))
            own = [k for k in v.users if k in self.sections and not self._sections[k].clones]
            is_stored = is_kept or not self._by_call or any(map(self._repeats, own))
            ways = n, hop.source, hop.is_skip
            found[key] = Arrival(*ways, size, v.gradient, holds, is_kept, is_late, is_stored)
        return [*found.values()]

    @cached_property
    def waits(self) -> bool:
        """Whether I does nothing, as the input needs no gradient, and keeps those that arrive."""
        return not any(x.gradient for x in self.arrivals)

    @cached_property
    def saver(self) -> int | None:
        """The last section that saves what a recomputation has to make; None if there is none."""
        saved = {k for n, v in self._values if v.made in self.sections for k in v.savers}
        kept = [k for k in self.sections if self._sections[k].kept or k in saved]
        return max(kept, default=None)

    def away(self, share: float) -> float:
        """The bytes of a cell of a map that leave, if a share of what its calls keep may leave.

        Other code keeps its own, and holds what is handed on. What was saved first leaves.
        """
        calls = {k for k in self.sections if self._sections[k].is_call}
        found = [(k, 0, x) for k in calls for x in self._sections[k].pieces]
        for n, v in self._values:
            if n in self.kept and n not in self.leaving and v.savers <= calls and not v.output:
                found.append((min(v.savers), v.made - min(v.savers), v.size))
        sizes = [x for *_, x in sorted(found, key=itemgetter(0, 1)) if x >= LEAST]
        left, away = share * sum(sizes), 0.0
        for x in sizes:
            away += x if away + x <= left else 0.0
        return away

    @property
    def at_once(self) -> bool:
        """Whether all of a cell is computed again before its backward begins."""
        return bool(self._out) or not self._by_call

    @cached_property
    def views(self) -> float:
        """The gradients of skips among what it gives back whose memory W needs, too."""
        found = 0.0
        for _, _, (source, k, is_skip) in self._within:
            half = self._sections[source].halves
            is_noted = half is not None and half.notes_output
            if is_noted and not is_skip and self._sections[k].rest == 0:
                found += sum(x.holds.get(k, 0.0) for _, x in self._values)
        return found

    # What a computation needs while it runs.

    @cached_property
    def forward(self) -> tuple[float, float]:
        """The most during F, above that before, and of an F whose cell is computed again."""
        return self._forward(), self._forward(keeps=False)

    @cached_property
    def again(self) -> float:
        """The same of R."""
        return self._forward(again=True)

    @cached_property
    def whole(self) -> Sequence[float]:
        """The most of the first B, and of a later one, with the gradients that it begins with."""
        return [self._backward(x, holds=True) for x in ("first", "later")]

    def adding(self, *, again: bool) -> Sequence[float]:
        """The same of autograd's backward: of the first, of the second, and of a later one."""
        if again not in self._adding:
            ways = "first", "adding" if self._by_call else "summing", "adding"
            self._adding[again] = [self._backward(x, holds=False, again=again) for x in ways]
        return self._adding[again]

    def _forward(self, *, keeps: bool = True, again: bool = False) -> float:
        """The most memory during a forward, above that before, or during a recomputation."""
        level = peak = 0.0
        for k in self.sections:
            section = self._sections[k]
            is_end = again and k == self.sections[-1]
            peak = max(peak, level + (section.again if is_end else section.forward))
            level += section.kept if keeps or not self._repeats(k) else 0.0
            level += self._makes[k]
            level -= (self._ends if keeps else self._drops)[k]
        return peak

    @cached_property
    def _passed(self) -> Sequence[dict[int, float]]:
        """The gradients between sections, by the one that makes them, and the one that gets them.

        The last are those of what a section gets, as the section itself counts them.
        """
        made, gone, used = found = [defaultdict[int, float](float) for _ in range(3)]
        ends: dict[tuple[int, int, bool], int] = {}
        for n, _, (source, k, is_skip) in (*self._arriving, *self._within):
            ends[n, source, is_skip] = max(k, ends.get((n, source, is_skip), k))
        for (n, source, is_skip), k in ends.items():
            # What goes to others, too, has its gradient before.
            if (n, source, is_skip) not in self._out:
                v, rest = self._all.values[n], self._sections[k].rest
                size = v.gradient if rest is None else min(rest, v.gradient)
                # A skip's may be a view, which holds more.
                size = v.holds.get(k, v.gradient) if is_skip else size
                made[k] += size
                gone[source] += size
                used[source] += v.gradient
        return found

    @cached_property
    def _gone_out(self) -> dict[int, float]:
        found = defaultdict[int, float](float)
        for (_, source, _), size in self._out.items():
            found[source] += size
        return found

    def _backward(self, way: str, *, holds: bool, again: bool = False) -> float:
        """The most memory during a backward, above that before, with the gradients of the output.

        These may be held to the end, and sections may be computed again as backward comes to them.
        """
        made, gone, used = self._passed
        stay = {"first": "trainable", "later": "small"}.get(way)
        level = peak = self.given
        for k, weights in zip(reversed(self.sections), reversed(self._each)):
            section, outer = self._sections[k], self._gone_out[k]
            if again and self._repeats(k):
                peak = max(peak, level + section.forward)
                # What the recomputation leaves behind.
                level += section.kept + self._remakes[k]
            is_held = holds and outer > 0
            most = getattr(section.held if is_held else section.free, way)
            peak = max(peak, level - section.kept - used[k] - outer + most)
            level -= section.kept + gone[k] + (0.0 if is_held else outer)
            level -= self._saves[k]
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
        pending = self._pending
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


def ways(stages: Sequence[Stage]) -> list[list[tuple[int, Arrival]]]:
    """The arrivals of each stage, with the numbers of the stages that they come from."""
    owner = {k: j for j, stage in enumerate(stages) for k in stage.sections}
    return [[(owner.get(x.source, 0), x) for x in stage.arrivals] for stage in stages]


def may_leave(stages: Sequence[Stage], placement: Sequence[int], *, is_joined: bool) -> list[float]:
    """The bytes that a cell of each stage keeps for backward, and nobody else holds.

    Outputs may stay until all are joined.
    """
    found = [stage.held for stage in stages]
    #: What each stage keeps: of its own, and of what has arrived, which it may hand on.
    kept = [stage.kept | {x.value for x in stage.arrivals if x.is_kept} for stage in stages]
    for k, arrivals in enumerate(ways(stages)):
        for j, x in arrivals:
            # What goes to another worker is a copy there.
            if placement[j] == placement[k] and x.value in kept[j]:
                found[j] -= x.size
            else:
                found[k] += x.size * x.is_kept
    found[-1] -= is_joined * (stages[-1].output - stages[-1].loose)
    return [max(0.0, x) for x in found]
