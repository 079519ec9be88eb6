"""The picture of a step in characters, as wide as a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.timeline.shares import by_stream, labels
from torchgpipe.timeline.span import Span

__all__ = ["characters"]

#: The columns of the picture beside the names of its rows.
WIDTH = 96


def characters(spans: Sequence[Span]) -> str:
    """Draw a row for each stream that computes: ``F3--`` is a forward, ``.`` is a wait.

    A computation is as wide as its time, rounded to columns, and one column at least. Its kind is
    repeated where there is no room for the number of its micro-batch. Of several that begin in one
    column, the last one is seen.

    Args:
        spans: those of one step, which begins at 0.
    """
    end = max(span.end for span in spans) or 1.0
    rows = by_stream(spans)
    names = labels([*rows])
    margin = max(map(len, names.values())) + 2
    lines = ["time".ljust(margin) + _ruler(end)]
    for stream, own in rows.items():
        row = ["."] * WIDTH
        for span in own:
            start, stop = (round(x / end * WIDTH) for x in (span.start, span.end))
            start = min(start, WIDTH - 1)
            stop = max(stop, start + 1)
            row[start:stop] = _word(span, stop - start)
        lines.append(names[stream].ljust(margin) + "".join(row))
    return "\n".join(lines)


def _word(span: Span, width: int) -> str:
    label = f"{span.kind}{span.microbatch}"
    if width > len(label):
        return label.ljust(width - 1, "-") + " "
    return span.kind * width


def _ruler(end: float) -> str:
    """Write the time at every quarter of the picture."""
    row = ""
    for quarter in range(4):
        row = row.ljust(quarter * WIDTH // 4) + f"{end * quarter / 4:.4g}"
    return f"{row.ljust(WIDTH)}{end:.6g}"
