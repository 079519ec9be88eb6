"""Containers: tensors are looked for, and replaced, in tuples, lists and dicts of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchgpipe.values.structure import flatten

__all__: list[str] = []

CONTAINERS = (tuple, list, dict)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that :func:`replaced` replaces."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Most arguments are tensors, and tuples and dicts of them. PyTorch's functions for trees take
    # several times as long.
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, CONTAINERS):
        for x in value.values() if isinstance(value, dict) else value:
            if x is not None:
                _collect(x, found)


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
    if isinstance(value, CONTAINERS):
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
        found: list[Any] = []
        args, kwargs = value
        for each in (*args, *kwargs.values()):
            if isinstance(each, CONTAINERS):
                _filled(each, found)
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


def _filled(value: Any, found: list[Any]) -> None:
    """Find all lists and dicts in a container."""
    if not isinstance(value, tuple):
        found.append(value)
    for x in value.values() if isinstance(value, dict) else value:
        if isinstance(x, CONTAINERS):
            _filled(x, found)


def _items(container: Any) -> list[int]:
    """The identities of what a container holds."""
    return [*map(id, container.values() if isinstance(container, dict) else container)]
