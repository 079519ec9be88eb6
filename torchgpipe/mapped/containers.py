"""Containers: their tensors, and what the model's own code changes in them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from torchgpipe.autograd.versions import version_of
from torchgpipe.values.structure import ATOMS, flatten

__all__: list[str] = []


#: ``CONTAINERS`` are the types of containers in which tensors are looked for and replaced.
#: ``KNOWN`` are the types of elements that ``map_tensors()`` may replace.
CONTAINERS = (tuple, list, dict, deque)
KNOWN = (Tensor, *CONTAINERS)


def tensors_of(value: Any, objects: list[Any] | None = None) -> list[Tensor]:
    """The tensors that :func:`replaced` replaces.

    Args:
        value: the value.
        objects: a list to which all is added that is neither a tensor, nor a container, nor plain.
    """
    tensors: list[Tensor] = []
    if type(value) in CONTAINERS or isinstance(value, CONTAINERS):
        _collect(value, tensors, objects)
    elif isinstance(value, Tensor):
        tensors.append(value)
    return tensors


def _collect(value: Any, tensors: list[Tensor], objects: list[Any] | None) -> None:
    # PyTorch's pytree functions would take several times as long.
    for x in value.values() if isinstance(value, dict) else value:
        # Types are compared first, which takes a fifth of the time of isinstance().
        kind = type(x)
        if kind is Tensor:
            tensors.append(x)
        elif kind in ATOMS:
            continue
        elif kind in CONTAINERS or isinstance(x, CONTAINERS):
            _collect(x, tensors, objects)
        elif isinstance(x, Tensor):
            tensors.append(x)
        elif objects is not None:
            objects.append(x)


def replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """A value with others in place of some of its tensors, by their identities."""
    return map_tensors(lambda x: others.get(id(x), x), value)


def map_arguments(
    function: Callable[[Tensor], Tensor],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    copies: list[Any],
    objects: list[Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Do as :func:`map_tensors` does, for the arguments of a call."""
    args, kwargs = arguments
    args = map_tensors(function, args, copies, objects)
    named = map_tensors(function, kwargs, copies, objects)
    if named is not kwargs:
        # The caller never sees this dict, so its copy is none of those to hand changes back from.
        copies.pop()
    return args, named


def map_tensors(
    function: Callable[[Tensor], Tensor],
    value: Any,
    copies: list[Any] | None = None,
    objects: list[Any] | None = None,
) -> Any:
    """A value with a function of each of its tensors in place of the tensor.

    The containers are those of Python, and subclasses of them that PyTorch knows. Other objects may
    hold state, as a key-value cache does, and must not be copied. They stay as they are, and so do
    the tensors in them, on whatever device. Containers whose tensors stay are not copied, either.

    Args:
        function: what replaces a tensor: another one, or the same.
        value: the value.
        copies: a list to which all containers but plain tuples are added that had to be copied.
        objects: as in :func:`tensors_of`.
    """
    kind = type(value)
    copied: Any = None
    if kind in CONTAINERS:
        for key, x in value.items() if kind is dict else enumerate(value):
            inner_kind = type(x)
            if inner_kind is Tensor:
                y = function(x)
            elif inner_kind in ATOMS:
                continue
            elif inner_kind in CONTAINERS or isinstance(x, KNOWN):
                y = map_tensors(function, x, copies, objects)
            else:
                if objects is not None:
                    objects.append(x)
                continue
            if y is not x:
                if copied is None:
                    copied = [*value] if kind is tuple else value.copy()
                copied[key] = y
        if kind is tuple and copied is not None:
            return tuple(copied)
    elif isinstance(value, Tensor):
        return function(value)
    elif isinstance(value, CONTAINERS):
        # flatten() may refuse a subclass of a container, so it is called only if tensors change.
        others = {id(x): y for x in tensors_of(value, objects) if (y := function(x)) is not x}
        if others:
            tensors, structure = flatten(value)
            copied = structure.unflatten(tuple([others.get(id(x), x) for x in tensors]))
    if copied is None:
        return value
    if copies is not None:
        copies.append(copied)
    return copied


class handing_back:
    """Do to lists, dicts and objects what a module does to copies of them, in a ``with`` block."""

    def __init__(self, value: Any, copy: Any) -> None:
        #: Each list, dict or object that was copied, and its copy: ``end()`` hands changes back.
        self._pairs: list[tuple[Any, Any]] = []
        #: For the id() of each element of a copy: the element, its version, and the original
        #: element, which ``end()`` puts back unless the module has changed the element of the copy.
        self._originals: dict[int, tuple[Any, int, Any]] = {}
        self._compare(value, copy)

    def _compare(self, value: Any, copy: Any) -> None:
        if value is copy:
            return
        value, copy = (x if isinstance(x, CONTAINERS) else _container(x) for x in (value, copy))
        if value is not None:
            if not isinstance(value, tuple):
                self._pairs.append((value, copy))
            for x, y in zip(_elements(value), _elements(copy)):
                self._originals[id(y)] = y, _version(y), x
                self._compare(x, y)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Hand changes back: a tensor that the module changed in place replaces the original."""
        for value, copy in self._pairs:
            wanted = [self._original(x) for x in _elements(copy)]
            if not same(_elements(value), wanted):
                fill(value, wanted)

    def _original(self, x: Any) -> Any:
        _, version, original = self._originals.get(id(x), (x, None, x))
        return original if version == _version(x) else x


def _version(x: Any) -> int:
    return version_of(x) if isinstance(x, Tensor) else 0


#: ``DEPTH`` limits the levels of nested containers that ``within()`` and ``mappings_of()`` search.
#: ``COUNT`` limits the values that ``within()`` finds in all, and ``mappings_of()`` in a container.
DEPTH, COUNT = 6, 1000

_SEQUENCES = (list, deque, set)
_DICTS = (dict, OrderedDict, defaultdict)

#: Objects of classes of these packages are not searched for attributes. A Python module would
#: lead to all its globals ("builtins"), a ``Call`` to the wrapper's state, a lock to nothing.
_UNSEARCHED = ("builtins", "torch", "torchgpipe", "threading", "logging")


def within(value: Any) -> list[Any]:
    """All that is in the containers and plain objects of a value, and in theirs in turn."""
    items: list[Any] = []
    waiting, seen = [(value, DEPTH)], set()
    while waiting:
        x, depth = waiting.pop()
        container = x if type(x) is tuple else _container(x)
        if container is None or id(x) in seen or depth == 0 or len(container) > COUNT - len(items):
            continue
        seen.add(id(x))
        elements = _elements(container)
        items += elements
        waiting += [(element, depth - 1) for element in elements]
    return items


def fill(container: Any, elements: list[Any]) -> None:
    """Give a container other elements; a dict has its keys first, and then its values."""
    if isinstance(container, list):
        container[:] = elements
        return
    container.clear()
    if isinstance(container, dict):
        half = len(elements) // 2
        for key, x in zip(elements[:half], elements[half:]):
            # Not by update(), which outputs of Transformers refuse.
            container[key] = x
    elif isinstance(container, set):
        container.update(elements)
    else:
        container.extend(elements)


def _elements(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    # Sorted by id(), since same() compares in order, and fill() may leave a set in another order.
    return sorted(container, key=id) if isinstance(container, set) else [*container]


def same(now: list[Any], before: list[Any]) -> bool:
    # By identity: to compare values of tensors would make the host wait for an accelerator.
    return len(now) == len(before) and all(map(is_, now, before))


def _container(x: Any) -> Any:
    """The container that holds the elements of a value, or its attributes; None without any."""
    return x if type(x) in _SEQUENCES or type(x) in _DICTS else attributes_of(x)


def attributes_of(x: Any) -> dict[str, Any] | None:
    """The attributes of a plain object; None of anything else."""
    kind = type(x)
    if kind.__module__.split(".")[0] in _UNSEARCHED or isinstance(x, Tensor | nn.Module):
        return None
    # Objects whose class has ``__setattr__`` are not plain: fill() of a ``__dict__`` bypasses it.
    owners = [owner for owner in kind.__mro__[:-1] if owner is not SimpleNamespace]
    has_setattr = any("__setattr__" in vars(owner) for owner in owners)
    attributes: dict[str, Any] | None = None if has_setattr else getattr(x, "__dict__", None)
    return attributes
