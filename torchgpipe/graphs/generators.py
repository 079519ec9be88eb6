"""Generators that a graph knows nothing of: Python's, NumPy's, and PyTorch's seed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchgpipe.graphs.places import UntraceableError

__all__: list[str] = []


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Check that these generators are left alone, and put them back if they are not.

    Raises:
        UntraceableError: the block has drawn, or seeded a generator.
    """
    # Nobody has imported NumPy for the sake of its numbers, if it is not there.
    numpy: Any = sys.modules.get("numpy")
    mine, seeded = random.getstate(), torch.get_rng_state()
    other: Any = numpy.random.get_state() if numpy else None
    moved = False
    try:
        yield
    finally:
        moved = random.getstate() != mine or not torch.equal(torch.get_rng_state(), seeded)
        if numpy:
            now = numpy.random.get_state()
            moved |= (now[1].tobytes(), *now[2:]) != (other[1].tobytes(), *other[2:])
        if moved:
            random.setstate(mine)
            torch.set_rng_state(seeded)
            if numpy:
                numpy.random.set_state(other)
    if moved:
        raise UntraceableError("it draws random numbers of Python or NumPy, or seeds PyTorch's")
