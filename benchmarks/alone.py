"""Dry runs that take little of this machine, and tell how much.

Each row has a process of its own, so that nobody else's memory counts as its memory. And of three
steps only the one that counts takes all micro-batches.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from typing import Any

from torchgpipe.testing.dry_run import COUNTED

__all__ = ["alone", "warmed"]

#: The micro-batches of a step that does not count.
WARM = 2


def alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call a function in a new process, and add what the process took of this machine.

    Args:
        function: of a module, since a new process imports it.
        *args: its arguments, which can be pickled.

    Returns:
        What the function returns, with ``processor`` in seconds and ``rss`` in bytes: the most
        memory that the process had, Python and PyTorch included.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_counted, (function, *args))


def _counted(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    start = time.process_time()
    row = function(*args)
    row["processor"] = time.process_time() - start
    row["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


def warmed(step: Callable[[int], None], m: int) -> Callable[[], None]:
    """A step whose first calls take few micro-batches, since they only make what stays.

    Time is the same as with all of them in each step, and so are the bytes of tensors, but for a
    tensor or two. What the allocator reserves is within 1 %, since it keeps what these steps took.

    Args:
        step: takes the number of micro-batches.
        m: the number that counts.
    """
    calls = count(1)
    return lambda: step(m if next(calls) == COUNTED else min(WARM, m))
