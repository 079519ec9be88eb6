"""Checkpoints of PyTorch: their functions are called again in backward, as the first time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch.utils import checkpoint

__all__: list[str] = []


class Repeated(threading.local):
    """The ways in which checkpoints of a thread call their functions, from the inside out."""

    makers: tuple[Callable[[], Callable[..., Any]], ...] = ()


repeated = Repeated()

#: Where a checkpoint that is not reentrant begins: from PyTorch 2.14 on, and before.
#: Without any, such checkpoints repeat neither the names of modules nor lent weights.
BEGINNINGS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)


class repeating:
    """Have checkpoints that begin in a ``with`` block call their functions in another way.

    Args:
        make: makes, for each of them, what it calls with its function and the arguments.
    """

    __slots__ = ("_make", "_outer")

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        _replace()

    def __enter__(self) -> None:
        self._outer, repeated.makers = repeated.makers, (self._make, *repeated.makers)

    def __exit__(self, *_: object) -> None:
        repeated.makers = self._outer


@cache
def _replace() -> None:
    """Replace where checkpoints of both kinds begin, once: no hook of theirs is for others."""
    room: Any = checkpoint
    function = room.CheckpointFunction
    forward = function.forward

    def first(ctx: Any, own: Callable[..., Any], *args: Any) -> Any:
        again = _again(own)
        found = forward(ctx, own, *args)
        ctx.run_function = again
        return found

    function.forward = staticmethod(first)
    name = next(filter(partial(hasattr, room), BEGINNINGS), None)
    if name is not None:
        begin = getattr(room, name)
        setattr(room, name, lambda own, *args, **kwargs: begin(_again(own), *args, **kwargs))


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    for make in repeated.makers:
        function = partial(make(), function)
    return function
