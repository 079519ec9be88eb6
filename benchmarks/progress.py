"""A progress bar for loops that take minutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], name: str, unit: str) -> Iterable[T]:
    """Iterate over items, with a bar on a terminal if tqdm is installed.

    Args:
        items: to iterate over.
        name: text before the bar.
        unit: name of an item.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc=name, unit=unit, disable=None)
    return bar
