"""Tables as text: columns side by side, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__: list[str] = []


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Put columns side by side; a column without any text is left out.

    Args:
        rows: the titles of the columns, and the rows below them.
        left: the columns that are flush left; the others are flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(row: Sequence[str]) -> str:
        cells = [(k, x, w) for k, (x, w) in enumerate(zip(row, widths)) if w]
        return "  ".join(x.ljust(w) if k in left else x.rjust(w) for k, x, w in cells)

    return "\n".join(line(row).rstrip() for row in rows)


def in_bytes(size: int) -> str:
    """A number of bytes with a unit, such as ``1.5 KiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    unit = min(max(0, (size.bit_length() - 1) // 10), len(units) - 1)
    return f"{size / 1024**unit:.{min(unit, 1)}f} {units[unit]}"


def as_mib(size: float) -> str:
    """A number of bytes in MiB, to a tenth, without the unit: for columns whose title has it."""
    return f"{size / 2**20:.1f}"


def in_gib(size: float) -> str:
    """A number of bytes to a hundredth of a GiB, for lines that compare the memory of devices."""
    return f"{size / 2**30:.2f} GiB"
