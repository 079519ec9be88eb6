"""Numbers that depend on the rows of a micro-batch: lines for times, curves for memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Curve", "Line", "through"]


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


class Curve:
    """A number that was seen at several sizes of micro-batch, and is a line in between.

    The most memory of a computation is no line: it is at one operator if the rows are few and
    weights take most of the memory, and at another one if they are many.

    Args:
        points: the rows of each size, and the number there.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self._points = sorted(points)
        if len(self._points) == 1:
            self._points.insert(0, (0.0, 0.0))

    def at(self, rows: float) -> float:
        """The number for a micro-batch of some rows. Beyond all sizes, the last line goes on."""
        points = self._points
        right = bisect_left(points, (rows,))
        right = min(max(right, 1), len(points) - 1)
        (x, a), (y, b) = points[right - 1], points[right]
        return max(0.0, a + (b - a) * (rows - x) / (y - x))
