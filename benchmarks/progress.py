"""Loops that take minutes: a progress bar, and an end in time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

#: The variable with the seconds after which a command begins nothing more, and when it began.
SECONDS = "BENCHMARK_SECONDS"
BEGAN = time.monotonic()


def progress(items: Sequence[T], name: str, unit: str) -> Iterator[T]:
    """Iterate over items, with a bar on a terminal if tqdm is installed.

    The first item is always measured. The others are left out, with a line on stderr for each, once
    the command has run for ``BENCHMARK_SECONDS``, as ``make gpu`` sets it.

    Args:
        items: to iterate over.
        name: text before the bar.
        unit: name of an item.
    """
    bar: Iterable[T] = items
    try:
        from tqdm import tqdm

        bar = tqdm(items, desc=name, unit=unit, disable=None)
    except ImportError:
        pass
    enough = float(os.environ.get(SECONDS, "inf"))
    for number, item in enumerate(bar):
        if number and time.monotonic() - BEGAN > enough:
            print(f"left out, since the time is over: {item}", file=sys.stderr)
        else:
            yield item
