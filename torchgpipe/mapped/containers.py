"""Containers: tensors are looked for, and replaced, in tuples, lists and dicts of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from torchgpipe.values.structure import flatten

__all__: list[str] = []

CONTAINERS = (tuple, list, dict)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that :func:`replaced` replaces."""
    found: list[Tensor] = []
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, CONTAINERS):
        _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Most arguments are tensors, and tuples and dicts of them. PyTorch's functions for trees take
    # several times as long.
    for x in value.values() if isinstance(value, dict) else value:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, CONTAINERS):
            _collect(x, found)


def replaced(value: Any, others: Mapping[int, Tensor], copies: list[Any] | None = None) -> Any:
    """A value with others in place of some of its tensors.

    The containers are those of Python, and subclasses of them that PyTorch knows. Other objects may
    hold state, as a key-value cache does, and must not be copied. They stay as they are, and so do
    the tensors in them, on whatever device. Containers without such a tensor stay, too.

    Args:
        value: the value.
        others: the others, by the identities of the tensors that they replace.
        copies: a list to which all lists and dicts are added that had to be copied.
    """
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    kind = type(value)
    found: Any = None
    if kind in CONTAINERS:
        for key, x in value.items() if kind is dict else enumerate(value):
            y = replaced(x, others, copies)
            if y is not x:
                if found is None:
                    found = [*value] if kind is tuple else value.copy()
                found[key] = y
        if kind is tuple and found is not None:
            return tuple(found)
    elif isinstance(value, CONTAINERS):
        tensors, structure = flatten(value)
        changed = tuple([others.get(id(x), x) for x in tensors])
        if any(x is not y for x, y in zip(changed, tensors)):
            found = structure.unflatten(changed)
    if found is None:
        return value
    if copies is not None and not isinstance(value, tuple):
        copies.append(found)
    return found


def filling_nothing(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module, and check that it does not fill lists and dicts, which are copies."""
    with unfilled(name, lists_and_dicts((args, *kwargs.values()))):
        return function(*args, **kwargs)


def lists_and_dicts(value: Any) -> list[Any]:
    """All lists and dicts in a value."""
    found: list[Any] = []
    if isinstance(value, list | dict):
        found.append(value)
    if isinstance(value, CONTAINERS):
        for x in value.values() if isinstance(value, dict) else value:
            found += lists_and_dicts(x)
    return found


class unfilled:
    """Check that copies of lists and dicts are not changed within a ``with`` block.

    Args:
        name: the name of the module that is called with them.
        copies: the lists and dicts.

    Raises:
        RuntimeError: a module filled, or changed, a list or dict that it was called with.
    """

    def __init__(self, name: str, copies: Iterable[Any]) -> None:
        self._name = name
        self._found = [(x, _items(x)) for x in copies]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and any(items != _items(x) for x, items in self._found):
            raise RuntimeError(
                "a module of a device map must not change a list or dict that it is called with, "
                f"since it gets a copy with tensors of its own device (module: {self._name}); have "
                "it return what it adds"
            )


def _items(container: Any) -> list[int]:
    """The identities of what a container holds."""
    return [*map(id, container.values() if isinstance(container, dict) else container)]
