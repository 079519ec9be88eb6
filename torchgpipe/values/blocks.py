"""Context managers made of generators, through which any exception passes as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

__all__: list[str] = []

Given = ParamSpec("Given")
Value = TypeVar("Value", covariant=True)


class Block(AbstractContextManager[Value, None], Generic[Value]):
    """A generator around a ``with`` block.

    What the block raises is not thrown into the generator, which is closed instead: its ``finally``
    runs, and nothing behind its ``yield``. An exception that comes back from a generator gets its
    traceback set, and those that take no attributes would become another error.
    """

    def __init__(self, generator: Iterator[Value]) -> None:
        self._generator = generator

    def __enter__(self) -> Value:
        return next(self._generator)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            next(self._generator, None)
        else:
            self._generator.close()  # type: ignore[attr-defined]


def contextmanager(
    function: Callable[Given, Iterator[Value]],
) -> Callable[Given, Block[Value]]:
    """Make context managers of a function, as :func:`contextlib.contextmanager` does."""

    @wraps(function)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Block[Value]:
        return Block(function(*args, **kwargs))

    return made
