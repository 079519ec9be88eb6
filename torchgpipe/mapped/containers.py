"""Containers: tensors are looked for, and replaced, in tuples, lists and dicts of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from torchgpipe.values.structure import flatten

__all__: list[str] = []


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors that :func:`replaced` replaces."""
    # Most arguments are tensors, and tuples and dicts of them. PyTorch's functions for trees take
    # several times as long.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors_of(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from tensors_of(x)


def replaced(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A value with a function of each of its tensors in place of the tensor.

    The containers are those of Python, and subclasses of them that PyTorch knows. Other objects may
    be somebody's state, as a cache of keys and values is, which must not become a copy. They stay
    what they are, and what is in them stays where it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([replaced(x, function) for x in value])
    if kind is dict:
        return {key: replaced(x, function) for key, x in value.items()}
    if isinstance(value, tuple | list | dict):
        tensors, structure = flatten(value)
        return structure.unflatten(tuple(map(function, tensors))) if tensors else value
    return value


class unfilled:
    """Check that copies of lists and dicts are not changed within a ``with`` block.

    Args:
        name: the name of the module that is called with them.
        value: the arguments of the call.

    Raises:
        RuntimeError: a module filled, or changed, a list or dict that it was called with.
    """

    def __init__(self, name: str, value: tuple[Any, Any]) -> None:
        self._name = name
        args, kwargs = value
        found = [x for each in (*args, *kwargs.values()) for x in _filled(each)]
        self._found = [(x, _items(x)) for x in found]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and any(items != _items(x) for x, items in self._found):
            raise RuntimeError(
                "a module of a device map must not change a list or dict that it is called with, "
                f"since it gets a copy with tensors of its own device (module: {self._name}); have "
                "it return what it adds"
            )


def _filled(value: Any) -> Iterator[Any]:
    """All lists and dicts in a value."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, tuple | list | dict):
        for x in value.values() if isinstance(value, dict) else value:
            yield from _filled(x)


def _items(container: Any) -> list[int]:
    """The identities of what a container holds."""
    return [*map(id, container.values() if isinstance(container, dict) else container)]
