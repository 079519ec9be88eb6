"""The most memory that a device needs in a step of a model under a device map.

The host issues the forwards of all micro-batches first, and then their backwards, the last one
first. So a device needs most at the end of the forwards, in the first backward, or in the second,
which adds gradients to those of the first. Each of them is gone through, section by section.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torchgpipe.planner.memory import EARLY
from torchgpipe.planner.sections import GIVEN, Section, Sections, Value

__all__ = ["Footprint", "Weights"]


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
    """What a device has of a value that several sections share.

    Attributes:
        size: its bytes there.
        made: the section that makes it there, or the first one that gets it.
        last: the last section that uses it there.
        moves: whether it comes from another device, or goes to one.
        comes: whether it comes from another device.
        kept: whether it is kept for backward.
        stored: whether it is kept where sections are computed again.
        slot: whether a section makes it a second time, beside what is stored.
        release: the last section of backward that needs it.
        gradient: the bytes of its gradient.
    """

    size: int
    made: int
    last: int
    moves: bool
    comes: bool
    kept: bool
    stored: bool
    slot: bool
    release: int
    gradient: int


class Device:
    """The memory of one device.

    Args:
        footprint: the memory of the model.
        blocks: the blocks of the device.
    """

    def __init__(self, footprint: Footprint, blocks: Collection[str | None]) -> None:
        found, self._all = footprint, footprint.found.sections
        self._chunks, self._again = found.chunks, found.again
        own = [k for k, x in enumerate(self._all) if x.block in blocks]
        self._own, self._numbers = own, {*own}
        values = found.found.values
        is_first = None in blocks
        self._shares = [
            share for x in values if (share := self._share(x, is_first=is_first)) is not None
        ]
        self._made, self._last, self._release = (
            _by(self._shares, key) for key in ("made", "last", "release")
        )
        self._cells = [self._cell(is_again=x) for x in (False, True)]
        self._weights = {x: found.weights.get(x, Weights()).trainable for x in blocks}
        #: What the caller has here for the whole of a step.
        self._base = found.least(blocks) + (found.chunks * found.found.given if is_first else 0)
        outputs = [x for x in values if x.output and x.made in self._numbers]
        #: What the caller gets of a micro-batch, and what of it nobody keeps anyway.
        self._output = sum(x.output for x in outputs)
        self._loose = sum(x.size for x in outputs if not x.savers & self._numbers)
        # A loss outside has all rows at once: it keeps as much, as the logarithms of a cross
        # entropy, and gets a gradient.
        self._loss = 0 if found.found.has_loss else 2 * found.chunks * self._output

    def _share(self, value: Value, *, is_first: bool) -> Share | None:
        used = sorted(value.users.keys() & self._numbers)
        is_here = value.made in self._numbers
        if value.made == GIVEN and is_first:
            # It is there anyway.
            return None
        if not (used or is_here):
            return None
        savers = value.savers & self._numbers
        is_called = is_here and self._all[value.made].is_call
        stored = any(self._all[k].is_call for k in used)
        stored = stored or any(not self._all[k].is_call for k in savers)
        slot = is_called and value.made in savers
        moves = not is_here or any(k not in self._numbers for k in value.users)
        return Share(
            value.size if is_here else max(value.users[k] for k in used),
            value.made if is_here else used[0],
            max([value.made, *used]),
            moves=moves,
            comes=not is_here,
            kept=bool(savers),
            stored=stored,
            slot=slot,
            release=min(savers or used or [value.made]),
            gradient=value.gradient,
        )

    def peak(self) -> float:
        """The most bytes of a step."""
        m, a = self._chunks, self._again
        before = self._base + self._held(m - 1) + (m - 1) * self._loose
        most = self._forward(before, is_again=a == m)
        joined = m * self._output if m > 1 else 0
        most = max(most, self._base + self._held(m) + m * self._loose + joined)
        base = self._base + self._loss + (joined if m > 1 else self._loose)
        for i in range(max(0, m - 2), m):
            level = base + self._held(i) + EARLY * i * self._arriving()
            most = max(most, self._backward(level, is_again=i < a, is_first=i == m - 1))
        return most

    def _held(self, count: int) -> float:
        """The memory of some micro-batches, from the first, between forward and backward."""
        again = min(count, self._again)
        return again * self._cells[True] + (count - again) * self._cells[False]

    def _cell(self, *, is_again: bool) -> int:
        held = sum(x.size for x in self._shares if (x.stored if is_again else x.kept))
        return held + sum(self._kept(self._all[k], is_again=is_again) for k in self._own)

    def _kept(self, section: Section, *, is_again: bool) -> int:
        return 0 if is_again and section.is_call else section.kept

    def _arriving(self) -> int:
        """The gradients that come from other devices, for one micro-batch."""
        return sum(x.gradient for x in self._shares if x.moves and not x.comes)

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
            level += sum(
                x.size * (1 + (x.moves and (x.stored if is_again else x.kept)))
                for x in made
                if not x.comes
            )
            level -= sum(
                x.size
                for x in self._last.get(k, ())
                if not (x.moves or (x.stored if is_again else x.kept))
            )
            most = max(most, level)
        return most

    def _backward(self, level: float, *, is_again: bool, is_first: bool) -> float:
        """The most memory in the backward of a micro-batch.

        Args:
            level: the memory of all else.
            is_again: whether sections are computed again.
            is_first: whether no other micro-batch has left gradients of weights.
        """
        weights = {**self._weights}
        level += self._cells[is_again]
        if not is_first:
            level += sum(weights.values())
            weights.clear()
        most = level
        for visit in reversed(self._visits()):
            for k in visit if is_again else ():
                section = self._all[k]
                if section.is_call:
                    most = max(most, level + section.forward)
                    level += section.kept
                    level += sum(x.size for x in self._made.get(k, ()) if x.slot)
            for k in reversed(visit):
                section, made = self._all[k], self._made.get(k, ())
                # Its backward counts what it has kept, and the gradients that it uses up.
                level -= section.kept
                level -= sum(x.gradient for x in made if x.last > k and not x.comes)
                most = max(most, level + (section.alone if is_first else section.adding))
                level -= sum(x.gradient for x in made if x.last > k and x.comes)
                level += sum(x.gradient for x in self._last.get(k, ()) if x.made < k)
                level -= sum(
                    x.size for x in self._release.get(k, ()) if (x.stored if is_again else x.kept)
                )
                if is_again:
                    level -= sum(x.size for x in made if x.slot)
                if not any(self._all[j].block == section.block for j in self._own if j < k):
                    level += weights.pop(section.block, 0)
                most = max(most, level)
        return most

    def _visits(self) -> list[list[int]]:
        """The sections of each visit of the device, between which others are called."""
        found: list[list[int]] = []
        for before, k in pairwise([-1, *self._own]):
            is_new = any(x.is_call for x in self._all[before + 1 : k])
            if not found or is_new:
                found.append([])
            found[-1].append(k)
        return found


def _by(shares: Iterable[Share], key: str) -> dict[int, list[Share]]:
    """Shares by the section that an attribute of theirs has."""
    found: dict[int, list[Share]] = {}
    for x in shares:
        found.setdefault(getattr(x, key), []).append(x)
    return found
