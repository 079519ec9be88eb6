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

#: The names of the function in which checkpoints with ``use_reentrant=False`` begin, from PyTorch
#: 2.14 on and before: :class:`repeating` replaces the function. If PyTorch has neither, backward
#: calls the functions of such checkpoints without, for example, the copies of lent weights.
BEGINNINGS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)


class repeating:
    """Have checkpoints that begin in a ``with`` block call their functions in another way.

    Args:
        make: makes a function for each checkpoint, which calls that with its own function and the
            arguments.
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
    """Replace, once, the functions in which checkpoints of both kinds begin: they have no hooks."""
    room: Any = checkpoint
    function = room.CheckpointFunction
    forward = function.forward

    def first(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
        again = _again(run)
        output = forward(ctx, run, *args)
        ctx.run_function = again
        return output

    function.forward = staticmethod(first)
    name = next(filter(partial(hasattr, room), BEGINNINGS), None)
    if name is not None:
        begin = getattr(room, name)
        setattr(room, name, lambda run, *args, **kwargs: begin(_again(run), *args, **kwargs))


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    for make in repeated.makers:
        function = partial(make(), function)
    return function
