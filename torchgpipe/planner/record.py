"""A record of a model: the memory that its sections take in forward, and in halves of backward.

A section is a layer of a sequential module, or in any other model a call of a block, or the code
after it up to the next call. What one section makes and others use is a value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

__all__: list[str] = []


class Halved(NamedTuple):
    """The bytes of a layer's backward in halves: for its input, and for its weights."""

    #: The most during I, above what was kept for it, with the gradients of the outputs, which stay.
    held: float = 0
    #: The same if these go with their last use.
    free: float = 0
    #: The most during W, above that before.
    weight: float = 0
    #: What is kept from I until W, values and gradients of the outputs aside.
    pending: float = 0
    #: The other gradients among it.
    noted: float = 0
    #: Whether those of the outputs are kept until W, too.
    notes_output: bool = False


#: The section of what the caller gives to the model.
GIVEN = -1


class Peaks(NamedTuple):
    """The most bytes during a backward: of what was kept for it, and of all that it makes."""

    #: Of the first micro-batch, whose gradients of weights stay.
    first: float = 0
    #: Of a later one under a schedule, whose large gradients are added at once. Small ones wait for
    #: the end.
    later: float = 0
    #: Of the second one under autograd, whose sums are new, and made at once.
    summing: float = 0
    #: Of a later one under autograd, which adds all gradients at once.
    adding: float = 0


NO_PEAKS = Peaks()


@dataclass
class Section:
    """A layer, or the call of a block, or the code after it."""

    #: The name of the block; None in front of the first one.
    block: str | None
    #: Whether it is a layer or the call of a block, which can be computed again.
    is_call: bool
    #: The number of its first node of autograd.
    first: int = 0
    #: The bytes that it keeps for backward, values aside.
    kept: float = 0
    #: The bytes of each piece of memory among these, in the order in which they were made.
    pieces: Sequence[float] = ()
    #: The bytes of its arguments, if it changes them in place, so that a checkpoint has clones.
    clones: float = 0
    #: The most bytes of what it makes at a time.
    forward: float = 0
    #: The same up to the last tensor that it saves.
    again: float = 0
    #: The most bytes during its backward, if the gradients of its outputs go with their last use.
    free: Peaks = NO_PEAKS
    #: The same if these stay to the end, as those of a partition do under a schedule.
    held: Peaks = NO_PEAKS
    #: The memory of backward in halves; None where nobody asked for it.
    halves: Halved | None = None
    #: The bytes of the gradients of the input, beside what those of skips hold; None if they are
    #: tensors of their own.
    rest: float | None = None


class Hop(NamedTuple):
    """The way of a value from one section to another, which may be a skip."""

    source: int
    target: int
    is_skip: bool


@dataclass(eq=False)
class Value:
    """Memory that one section makes, and others use or keep, or the caller gets."""

    #: The number of the section that makes it, or :data:`GIVEN`.
    made: int
    size: float
    #: For each other section that uses it, the bytes of what it uses.
    users: dict[int, float] = field(default_factory=dict)
    #: The ways to them: from which section, to which, and whether as a skip.
    hops: set[Hop] = field(default_factory=set)
    #: The sections that keep it for backward.
    savers: set[int] = field(default_factory=set)
    #: Those of them that keep it from I until W.
    late: set[int] = field(default_factory=set)
    #: The bytes of its gradient.
    gradient: float = 0
    #: For sections that get it as a skip, the bytes that its gradient holds there: more where that
    #: is a view, as that of what is concatenated.
    holds: dict[int, float] = field(default_factory=dict)
    #: The bytes of the tensors in it that the model returns.
    output: float = 0

    def use(self, section: int, tensor: Tensor, source: int, *, is_skip: bool = False) -> None:
        """Take note that a section uses a tensor in this memory, and which one it comes from."""
        self.users[section] = max(self.users.get(section, 0), tensor.nbytes)
        self.hops.add(Hop(source, section, is_skip))
        if tensor.requires_grad:
            self.gradient = max(self.gradient, tensor.nbytes)

    def give(self, tensor: Tensor) -> None:
        """Take note that the caller gets a tensor in this memory."""
        # Losses are joined, too, but take next to nothing.
        self.output += tensor.nbytes if tensor.dim() else 0
        self.gradient = max(self.gradient, tensor.requires_grad * tensor.nbytes)


@dataclass(frozen=True)
class Record:
    """The sections of a model and what they share, for one micro-batch."""

    sections: Sequence[Section]
    #: What several of them use.
    values: Sequence[Value]
    #: The bytes that the caller gives.
    given: float = 0
    #: Whether the model returns a loss.
    has_loss: bool = False
    #: Whether an output is of a kind that is computed when somebody looks at it.
    fills_itself: bool = False

    @cached_property
    def _by_section(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for n, x in enumerate(self.values):
            for k in {x.made, *x.users, *x.savers, *[hop.source for hop in x.hops]}:
                found.setdefault(k, []).append(n)
        return found

    def touching(self, sections: Iterable[int]) -> list[int]:
        """The numbers of the values that sections make, use, keep or hand on."""
        return sorted({n for k in sections for n in self._by_section.get(k, ())})


class Sizes:
    """The records of a model with several sizes of micro-batch, and lines in between.

    The most memory of a computation is no line: it is at one operator if the rows are few and
    weights take most of the memory, and at another one if they are many.

    Args:
        records: the records, by the rows.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self._found: dict[float, Record] = dict(records.items())
        self._rows = sorted(records)

    @property
    def has_skips(self) -> bool:
        """Whether a value goes to another layer than the next one."""
        values = self._found[self._rows[0]].values
        return any(hop.is_skip for x in values for hop in x.hops)

    def at(self, rows: float) -> Record:
        """The record of a micro-batch of some rows. Beyond all sizes, the last line goes on."""
        if rows not in self._found:
            k = min(bisect_left(self._rows, rows, 1), len(self._rows) - 1)
            y = self._rows[k]
            # With one size, all is in proportion to it.
            x = self._rows[k - 1] if k else 0
            before = self._found[x] if k else None
            self._found[rows] = _mixed(before, self._found[y], (rows - x) / (y - x))
        return self._found[rows]


#: What is on a line between records; all else is the same in each.
MIXED = {"sections", "values", "kept", "forward", "again", "free", "held", "halves", "rest"}
MIXED |= {"size", "users", "gradient", "holds", "output"}


def _mixed(x: Any, y: Any, share: float) -> Any:
    """The record, or number, on the line through two others, or from nothing to the second one."""
    if isinstance(y, Record | Section | Value):
        names = MIXED & vars(y).keys()
        return replace(y, **{k: _mixed(x and vars(x)[k], vars(y)[k], share) for k in names})
    if isinstance(y, dict):
        return {k: _mixed(None if x is None else x.get(k, z), z, share) for k, z in y.items()}
    if isinstance(y, list | tuple):
        found = [_mixed(x and x[k], z, share) for k, z in enumerate(y)]
        return type(y)(*found) if isinstance(y, tuple) else found
    if y is None or isinstance(y, bool):
        return y
    return max(0.0, share * y if x is None else x + share * (y - x))
