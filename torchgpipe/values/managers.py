"""Context managers made from generators, which let any exception pass unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

__all__: list[str] = []


Given = ParamSpec("Given")
Value = TypeVar("Value", covariant=True)


class Block(AbstractContextManager[Value, None], Generic[Value]):
    """A context manager around a generator with one ``yield``.

    An exception of the block is not thrown into the generator. The generator is closed instead: its
    ``finally`` clauses run, but not the code after its ``yield``. To throw it would set the
    exception's traceback, which fails for an exception without settable attributes, and hides it.
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
    """Make context managers of a generator, as :func:`contextlib.contextmanager` does."""

    @wraps(function)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Block[Value]:
        return Block(function(*args, **kwargs))

    return made
