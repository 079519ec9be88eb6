"""Random numbers that a graph cannot draw: those of Python and NumPy, and seeds of PyTorch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.graphs.places import UntraceableError

__all__: list[str] = []


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Check that a block leaves these generators alone, and restore them if it does not.

    Draws from PyTorch's own generator are part of the graph. Other threads may draw from it at the
    same time, so only a new seed counts. For the other generators it is unknown which thread has
    drawn: if another one has, it may draw the same numbers again.

    Raises:
        UntraceableError: the block has drawn from the others, or seeded PyTorch's.
    """
    # If NumPy is not imported, nobody has drawn from its generator.
    numpy: Any = sys.modules.get("numpy")
    mine, state = random.getstate(), torch.get_rng_state()
    other: Any = numpy.random.get_state() if numpy else None
    seed = torch.initial_seed()
    moved = False
    try:
        yield
    finally:
        if _is_seeded(seed, state):
            moved = True
            torch.set_rng_state(state)
        if random.getstate() != mine:
            moved = True
            random.setstate(mine)
        if numpy:
            now = numpy.random.get_state()
            if (now[1].tobytes(), *now[2:]) != (other[1].tobytes(), *other[2:]):
                moved = True
                numpy.random.set_state(other)
    if moved:
        raise UntraceableError("it draws random numbers of Python or NumPy, or seeds PyTorch's")


def _is_seeded(seed: int, state: Tensor) -> bool:
    """Whether PyTorch's generator was seeded since, maybe with the same seed."""
    if torch.initial_seed() != seed:
        return True
    now = torch.get_rng_state()
    if torch.equal(now, state):
        return False
    return torch.equal(now, torch.Generator().manual_seed(seed).get_state())
