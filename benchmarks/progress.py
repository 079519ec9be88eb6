"""A progress bar for whatever takes minutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], name: str, unit: str) -> Iterable[T]:
    """The items, with a bar on a terminal if tqdm is installed.

    Args:
        items: what is done one by one.
        name: what stands before the bar.
        unit: what an item is called.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc=name, unit=unit, disable=None)
    return bar
