"""The most memory that a device needs in a step of a model under a device map.

The host issues the forwards of all micro-batches first, and then their backwards, the last one
first. So a device needs most at the end of the forwards, in the first backward, or in the second,
which adds gradients to those of the first. Each of them is gone through, section by section.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from torchgpipe.planner.sections import GIVEN, Section, Sections, Value

__all__ = ["Footprint", "Weights"]

Item = TypeVar("Item")
Key = TypeVar("Key")


class Weights(NamedTuple):
    """The memory of the weights of a block.

    Attributes:
        all: the bytes of its parameters and buffers.
        trainable: those of the parameters that get a gradient.
    """

    all: int = 0
    trainable: int = 0


@dataclass(frozen=True)
class Footprint:
    """The memory of a model, whichever blocks a device has.

    Args:
        found: the sections of the model, for one micro-batch.
        weights: the weights of each block; under None those that belong to no block.
        chunks: the number of micro-batches.
        again: how many of them, from the first, are computed again.
        state: memory of the optimizer, for each byte of a parameter that it changes.
    """

    found: Sections
    weights: Mapping[str | None, Weights]
    chunks: int
    again: int
    state: float

    @cached_property
    def own(self) -> dict[str | None, list[int]]:
        """The numbers of the sections of each block."""
        return _by(range(len(self.found.sections)), lambda k: [self.found.sections[k].block])

    @cached_property
    def touched(self) -> dict[str | None, list[Value]]:
        """The values that the sections of each block make, use or keep."""
        sections = self.found.sections

        def blocks(x: Value) -> Iterable[str | None]:
            numbers = {x.made, *x.users, *x.savers} - {GIVEN}
            return {sections[k].block for k in numbers}

        return _by(self.found.values, blocks)

    def least(self, blocks: Collection[str | None]) -> float:
        """The bytes that a device has between two steps, gradients aside."""
        own = [self.weights.get(x, Weights()) for x in blocks]
        return sum(x.all + self.state * x.trainable for x in own)

    def peak(self, blocks: Collection[str | None]) -> float:
        """Find the most bytes of a device that has some blocks.

        Args:
            blocks: their names, with None for the first device, which has all else.
        """
        return Device(self, blocks).peak()


class Share(NamedTuple):
    """A value that several sections share, as one device has it.

    Attributes:
        size: its bytes there.
        made: the section that makes it there, or the first one that gets it.
        last: the last section that uses it there.
        comes: whether it comes from another device.
        leaves: whether it goes to another device.
        kept: whether it is kept for backward.
        stored: whether it is kept where sections are computed again.
        slot: whether a section makes it a second time, beside what is stored.
        release: the last section of backward that needs it.
        gradient: the bytes of its gradient.
        output: the bytes of it that the caller gets.
    """

    size: int
    made: int
    last: int
    comes: bool
    leaves: bool
    kept: bool
    stored: bool
    slot: bool
    release: int
    gradient: int
    output: int


class Device:
    """The memory of one device.

    Args:
        footprint: the memory of the model.
        blocks: the blocks of the device.
    """

    def __init__(self, footprint: Footprint, blocks: Collection[str | None]) -> None:
        self._all = footprint.found.sections
        self._chunks, self._again = footprint.chunks, footprint.again
        #: The sections that are computed again: calls, and the code behind the last one.
        self._repeated = [x.is_call for x in self._all[:-1]] + [True]
        #: Whether what the model returns beside its loss is not there.
        self._omits = (
            footprint.found.has_loss
            and footprint.found.fills_itself
            and self._again == self._chunks
        )
        own = sorted(k for x in blocks for k in footprint.own.get(x, ()))
        self._own, self._numbers = own, {*own}
        self._firsts = {x: footprint.own[x][0] for x in blocks if x in footprint.own}
        values = [*dict.fromkeys(x for block in blocks for x in footprint.touched.get(block, ()))]
        is_first = None in blocks
        self._shares = [
            share for x in values if (share := self._share(x, is_first=is_first)) is not None
        ]
        self._visits = self._cut()
        self._made = _by(self._shares, lambda x: [x.made])
        self._last = _by(self._shares, lambda x: [x.last])
        self._release = _by(self._shares, lambda x: [x.release])
        self._cells = [self._cell(is_again=x) for x in (False, True)]
        self._weights = {x: footprint.weights.get(x, Weights()).trainable for x in blocks}
        #: What the caller has here for the whole of a step.
        given = footprint.chunks * footprint.found.given
        self._base = footprint.least(blocks) + (given if is_first else 0)
        outputs = [x for x in values if x.output and x.made in self._numbers and not self._omits]
        #: What the caller gets of a micro-batch, and what of it nobody keeps anyway.
        self._output = sum(x.output for x in outputs)
        self._loose = sum(x.size for x in outputs if not x.savers & self._numbers)
        #: The gradient that a loss outside makes of the output of all micro-batches.
        self._outside = 0 if footprint.found.has_loss else footprint.chunks * self._output

    def _share(self, value: Value, *, is_first: bool) -> Share | None:
        used = sorted(value.users.keys() & self._numbers)
        is_here = value.made in self._numbers
        if value.made == GIVEN and is_first:
            # It is there anyway.
            return None
        if not (used or is_here):
            return None
        savers = value.savers & self._numbers
        is_called = is_here and self._repeated[value.made]
        # What takes no part in backward, as frozen blocks at the beginning, is not computed again.
        stored = any(self._all[k].is_call and self._all[k].alone for k in used)
        stored = stored or any(not self._repeated[k] for k in savers)
        slot = is_called and value.made in savers
        return Share(
            value.size if is_here else max(value.users[k] for k in used),
            value.made if is_here else used[0],
            max([value.made, *used]),
            comes=not is_here,
            leaves=is_here and any(k not in self._numbers for k in value.users),
            kept=bool(savers),
            stored=stored,
            slot=slot,
            release=min(savers or used or [value.made]),
            gradient=value.gradient,
            output=value.output if is_here and not self._omits else 0,
        )

    def peak(self) -> float:
        """The most bytes of a step."""
        m, a = self._chunks, self._again
        before = self._base + self._held(m - 1) + (m - 1) * self._loose
        most = self._forward(before, is_again=a == m)
        joined = m * self._output if m > 1 else 0
        most = max(most, self._base + self._held(m) + m * self._loose + joined)
        base = self._base + (joined if m > 1 else self._loose)
        # A loss outside keeps as much as it gets, as the logarithms of a cross entropy, and has
        # two gradients at a time.
        most = max(most, base + self._held(m) + 3 * self._outside)
        base += self._outside
        for i in range(max(0, m - 2), m):
            level = base + self._held(i) + self._early(i, m - i)
            most = max(most, self._backward(level, i, is_again=i < a, is_first=i == m - 1))
        return most

    def _held(self, count: int) -> float:
        """The memory of some micro-batches, from the first, between forward and backward."""
        again = min(count, self._again)
        return again * self._cells[True] + (count - again) * self._cells[False]

    def _cell(self, *, is_again: bool) -> int:
        held = sum(x.size for x in self._shares if (x.stored if is_again else x.kept))
        return held + sum(self._kept(self._all[k], is_again=is_again) for k in self._own)

    def _kept(self, section: Section, *, is_again: bool) -> int:
        is_repeated = section.is_call or section is self._all[-1]
        return 0 if is_again and is_repeated else section.kept

    def _early(self, others: int, backwards: int) -> float:
        """The gradients that other devices send before they are due, for other micro-batches.

        Autograd has a thread for each device. One with less to do gets ahead, as the last device
        where little comes behind the middle one. Some thread may always be ahead by one.

        Args:
            others: the number of other micro-batches.
            backwards: the number of backwards from the first one to the one that is gone through.
        """
        found = 0.0
        visits = self._visits
        for visit, then in zip(visits, [*visits[1:], [len(self._all)]]):
            sent = sum(x.gradient for k in visit for x in self._made.get(k, ()) if x.leaves)
            own, behind = (
                sum(self._all[k].nodes for k in sections)
                for sections in (visit, range(visit[-1] + 1, then[0]))
            )
            ahead = backwards * (own / max(1, min(own, behind)) - 1)
            found += min(others, max(1.0, ahead)) * sent
        return found

    def _forward(self, level: float, *, is_again: bool) -> float:
        """The most memory in the forward of a micro-batch.

        What comes and goes is there until the micro-batch has passed all devices.
        """
        most = level
        for k in self._own:
            section = self._all[k]
            made = self._made.get(k, ())
            level += sum(x.size for x in made if x.comes)
            most = max(most, level + section.forward)
            level += self._kept(section, is_again=is_again)
            # What goes is there as a clone, too.
            level += sum(x.size * (1 + x.leaves) for x in made if not x.comes)
            level -= sum(
                x.size
                for x in self._last.get(k, ())
                if not (x.comes or x.leaves or (x.stored if is_again else x.kept))
            )
            most = max(most, level)
        return most

    def _backward(self, level: float, others: int, *, is_again: bool, is_first: bool) -> float:
        """The most memory in the backward of a micro-batch.

        Args:
            level: the memory of all else, other micro-batches included.
            others: the number of these.
            is_again: whether sections are computed again.
            is_first: whether no other micro-batch has left gradients of weights.
        """
        weights = {**self._weights}
        level += self._cells[is_again]
        if not is_first:
            level += sum(weights.values())
            weights.clear()
        most = level
        visits = self._visits
        for number, visit in reversed([*enumerate(visits)]):
            # Where nothing leaves, a section is computed again when its backward comes to it.
            at_once = any(x.leaves for k in visit for x in self._made.get(k, ()))
            for k in visit if is_again and at_once else ():
                most = max(most, level + self._again_of(k))
                level += self._second(k)
            for k in reversed(visit):
                section, made = self._all[k], self._made.get(k, ())
                if is_again and not at_once:
                    most = max(most, level + self._again_of(k))
                    level += self._second(k)
                # Its backward counts what it has kept, and the gradients that it uses up.
                level -= section.kept
                level -= sum(x.gradient for x in made if x.last > k and not x.comes)
                own = section.alone if is_first else section.adding
                # The gradient of an output is a part of what the loss outside has.
                output = sum(x.output for x in made) if self._outside else 0
                most = max(most, level + own - output)
                # Of several micro-batches it is there until all have had their parts of it.
                level -= output if self._chunks == 1 else 0
                level -= sum(x.gradient for x in made if x.last > k and x.comes)
                level += sum(x.gradient for x in self._last.get(k, ()) if x.made < k)
                level -= sum(
                    x.size for x in self._release.get(k, ()) if (x.stored if is_again else x.kept)
                )
                if is_again:
                    level -= sum(x.size for x in made if x.slot)
                if self._firsts[section.block] == k:
                    level += weights.pop(section.block, 0)
                most = max(most, level)
            if number:
                ahead = self._ahead(visits[number - 1], visit) * (1 if is_first else 2)
                level -= min(others, ahead) * self._held_by(visit)
        return most

    def _again_of(self, k: int) -> int:
        """The most memory of a second run of a section."""
        return self._all[k].forward if self._repeated[k] else 0

    def _second(self, k: int) -> int:
        """The memory that a second run of a section leaves behind."""
        if not self._repeated[k]:
            return 0
        return self._all[k].kept + sum(x.size for x in self._made.get(k, ()) if x.slot)

    def _ahead(self, before: Sequence[int], visit: Sequence[int]) -> int:
        """The number of other micro-batches that a visit has done when the one before it begins.

        The device has nothing else to do while others compute what is in between.
        """
        between, own = (
            sum(x.nodes for x in sections)
            for sections in (self._all[before[-1] + 1 : visit[0]], [self._all[k] for k in visit])
        )
        return between // max(1, own)

    def _held_by(self, visit: Sequence[int]) -> int:
        """The memory that a visit keeps of a micro-batch that is computed again: the least."""
        return sum(self._kept(self._all[k], is_again=True) for k in visit) + sum(
            x.size
            for k in visit
            for x in self._release.get(k, ())
            if x.stored and x.made >= visit[0]
        )

    def _cut(self) -> list[list[int]]:
        """The sections of each visit of the device, between which others are called."""
        found: list[list[int]] = []
        for before, k in pairwise([-1, *self._own]):
            is_new = any(x.is_call for x in self._all[before + 1 : k])
            if not found or is_new:
                found.append([])
            found[-1].append(k)
        return found


def _by(items: Iterable[Item], keys: Callable[[Item], Iterable[Key]]) -> dict[Key, list[Item]]:
    """Items by each of their keys."""
    found: dict[Key, list[Item]] = {}
    for x in items:
        for key in keys(x):
            found.setdefault(key, []).append(x)
    return found
