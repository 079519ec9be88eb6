"""A record of a model: the memory that its sections take in forward, and in halves of backward."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

__all__: list[str] = [
    "GIVEN",
    "Hop",
    "Peaks",
    "Record",
    "Section",
    "Sizes",
    "Value",
    "Halved",
]


# The memory of a layer's backward in halves: for its input, and for its weights.


class Halved(NamedTuple):
    """The memory of a backward in halves, in bytes.

    Attributes:
        held: the most during I, above what was kept for it, with the gradients of the outputs,
            which stay.
        free: the same if these go with their last use.
        weight: the most during W, above that before.
        pending: what is kept from I until W, values and gradients of the outputs aside.
        noted: the other gradients among it.
        notes_output: whether those of the outputs are kept until W, too.
    """

    held: float = 0
    free: float = 0
    weight: float = 0
    pending: float = 0
    noted: float = 0
    notes_output: bool = False


# A record of a model: what each of its sections takes of memory, in one forward and backward.
#
# A section is a layer of a sequential module, or in any other model a call of a block, or the
# code after it up to the next call. What one section makes and others use is a value.


#: The section of what the caller gives to the model.
GIVEN = -1


class Peaks(NamedTuple):
    """The most bytes during a backward: of what was kept for it, and all that it makes or uses up.

    Attributes:
        first: of the first micro-batch, whose gradients of weights stay.
        later: of a later one under a schedule, whose large gradients are added at once. Small ones
            wait for the end.
        summing: of the second one under autograd, whose sums are new, and made at once.
        adding: of a later one under autograd, which adds all gradients at once.
    """

    first: float = 0
    later: float = 0
    summing: float = 0
    adding: float = 0


NO_PEAKS = Peaks()


@dataclass
class Section:
    """A layer, or the call of a block, or the code after it.

    Args:
        block: the name of the block; None in front of the first one.
        is_call: whether it is a layer or the call of a block, which can be computed again.
        first: the number of its first node of autograd.
        kept: the bytes that it keeps for backward, values aside.
        forward: the most bytes of what it makes at a time.
        again: the same up to the last tensor that it saves.
        free: the most bytes during its backward, if the gradients of its outputs go with their last
            use.
        held: the same if these stay to the end, as those of a partition do under a schedule.
        halves: the memory of backward in halves; None where nobody asked for it.
        rest: the bytes of the gradients of the input, beside what those of skips hold; None if they
            are tensors of their own.
    """

    block: str | None
    is_call: bool
    first: int = 0
    kept: float = 0
    forward: float = 0
    again: float = 0
    free: Peaks = NO_PEAKS
    held: Peaks = NO_PEAKS
    halves: Halved | None = None
    rest: float | None = None


class Hop(NamedTuple):
    """The way of a value from one section to another, which may be a skip."""

    source: int
    target: int
    is_skip: bool


@dataclass(eq=False)
class Value:
    """Memory that one section makes, and others use or keep, or the caller gets.

    Args:
        made: the number of the section that makes it, or :data:`GIVEN`.
        size: its bytes.
        users: for each other section that uses it, the bytes of what it uses.
        hops: the ways to them: from which section, to which, and whether as a skip.
        savers: the sections that keep it for backward.
        late: those of them that keep it from I until W.
        gradient: the bytes of its gradient.
        holds: for sections that get it as a skip, the bytes that its gradient holds there: more
            where that is a view, as that of what is concatenated.
        output: the bytes of the tensors in it that the model returns.
    """

    made: int
    size: float
    users: dict[int, float] = field(default_factory=dict)
    hops: set[Hop] = field(default_factory=set)
    savers: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    gradient: float = 0
    holds: dict[int, float] = field(default_factory=dict)
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
    """The sections of a model and what they share, for one micro-batch.

    Args:
        sections: the sections, in their order.
        values: what several of them use.
        given: the bytes that the caller gives.
        has_loss: whether the model returns a loss.
        fills_itself: whether an output is of a kind that is computed when somebody looks at it.
    """

    sections: Sequence[Section]
    values: Sequence[Value]
    given: float = 0
    has_loss: bool = False
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


def _mix(x: Any, y: Any, share: float) -> Any:
    """Mix numbers, also within tuples and tables, and leave what is none."""
    if isinstance(y, dict):
        return {k: _mix(None if x is None else x.get(k, z), z, share) for k, z in y.items()}
    if isinstance(y, tuple):
        return type(y)(*[_mix(None if x is None else x[k], z, share) for k, z in enumerate(y)])
    if y is None or isinstance(y, bool):
        return y
    return max(0.0, share * y if x is None else x + share * (y - x))


def _mixed(a: Record | None, b: Record, share: float) -> Record:
    """The record on the line through two others, or from nothing to the second one."""

    def mixed(x: Any, y: Any, keys: str) -> Any:
        pairs = {key: (x and getattr(x, key), getattr(y, key)) for key in keys.split()}
        return replace(y, **{key: _mix(*pair, share) for key, pair in pairs.items()})

    sections, values = (a.sections, a.values) if a else (repeat(None), repeat(None))
    kept, sizes = "kept forward again free held halves rest", "size users gradient holds output"
    return replace(
        b,
        sections=[mixed(*x, kept) for x in zip(sections, b.sections)],
        values=[mixed(*x, sizes) for x in zip(values, b.values)],
    )
