"""Figures that depend on the rows of a micro-batch: lines for times, and records for memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchgpipe.planner.record import Record

__all__ = ["Line", "Sizes", "through"]


@dataclass(frozen=True)
class Line:
    """A number that depends on the rows of a micro-batch: ``constant + slope * rows``."""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, rows: float) -> float:
        """The number for a micro-batch of some rows."""
        return max(0.0, self.constant + self.slope * rows)


def through(first: tuple[int, float], second: tuple[int, float] | None = None) -> Line:
    """The line through two points, of which the constant part is not negative.

    Args:
        first: rows and the number there.
        second: likewise; without it, the number is taken to be proportional to the rows.
    """
    rows, value = first
    if second is None:
        return Line(0.0, value / rows)
    others, other = second
    slope = max(0.0, (value - other) / (rows - others))
    constant = value - slope * rows
    # Noise may make few rows seem to be slower than they are.
    return Line(constant, slope) if constant > 0 else Line(0.0, value / rows)


class Sizes:
    """The records of a model with several sizes of micro-batch, and lines in between.

    The most memory of a computation is no line: it is at one operator if the rows are few and
    weights take most of the memory, and at another one if they are many.

    Args:
        records: the records, by the rows.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self._records = dict(sorted(records.items()))
        self._found: dict[float, Record] = {}

    @property
    def has_skips(self) -> bool:
        """Whether a value goes to another layer than the next one."""
        values = next(iter(self._records.values())).values
        return any(hop.is_skip for x in values for hop in x.hops)

    def at(self, rows: float) -> Record:
        """The record of a micro-batch of some rows. Beyond all sizes, the last line goes on."""
        if rows not in self._found:
            self._found[rows] = self._records.get(int(rows)) or self._between(rows)
        return self._found[rows]

    def _between(self, rows: float) -> Record:
        sizes = [*self._records]
        right = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        b = self._records[sizes[right]]
        if not right:
            # In proportion to the only size.
            return _mixed(b, b, rows / sizes[0], is_line=False)
        x, y = sizes[right - 1], sizes[right]
        return _mixed(self._records[x], b, (rows - x) / (y - x))


def _mixed(a: Record, b: Record, share: float, *, is_line: bool = True) -> Record:
    """The record on the line through two others, or from nothing to the second one."""

    def mix(x: float, y: float) -> float:
        return max(0.0, x + share * (y - x)) if is_line else share * y

    sections = [
        replace(y, **{key: _each(mix, getattr(x, key), getattr(y, key)) for key in _SIZES})
        for x, y in zip(a.sections, b.sections)
    ]
    values = [
        replace(
            y,
            size=mix(x.size, y.size),
            users={k: mix(x.users.get(k, size), size) for k, size in y.users.items()},
            gradient=mix(x.gradient, y.gradient),
            holds={k: mix(x.holds.get(k, size), size) for k, size in y.holds.items()},
            output=mix(x.output, y.output),
        )
        for x, y in zip(a.values, b.values)
    ]
    return Record(sections, values)


def _each(mix: Callable[[float, float], float], x: Any, y: Any) -> Any:
    """Mix numbers, also those within tuples of both, and leave what is none."""
    if isinstance(x, tuple):
        return type(x)(*[_each(mix, *pair) for pair in zip(x, y)])
    return x if x is None or isinstance(x, bool) else mix(x, y)


#: What is a number of bytes of a section, or several.
_SIZES = ("kept", "forward", "again", "free", "held", "halves", "rest")
