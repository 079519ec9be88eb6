"""Figures that depend on the rows of a micro-batch: lines for times, and records for memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import repeat
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
    others, other = second or (0, 0.0)
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


def _mixed(a: Record | None, b: Record, share: float) -> Record:
    """The record on the line through two others, or from nothing to the second one."""

    def mix(x: Any, y: Any) -> Any:
        """Mix numbers, also within tuples and tables, and leave what is none."""
        if isinstance(y, dict):
            return {k: mix(None if x is None else x.get(k, z), z) for k, z in y.items()}
        if isinstance(y, tuple):
            return type(y)(*[mix(None if x is None else x[k], z) for k, z in enumerate(y)])
        if y is None or isinstance(y, bool):
            return y
        return max(0.0, share * y if x is None else x + share * (y - x))

    def mixed(x: Any, y: Any, keys: str) -> Any:
        pairs = {key: (x and getattr(x, key), getattr(y, key)) for key in keys.split()}
        return replace(y, **{key: mix(*pair) for key, pair in pairs.items()})

    sections, values = (a.sections, a.values) if a else (repeat(None), repeat(None))
    return Record(
        [mixed(*x, "kept forward again free held halves rest") for x in zip(sections, b.sections)],
        [mixed(*x, "size users gradient holds output") for x in zip(values, b.values)],
    )
