"""Containers: their tensors, and what the model's own code changes in them, or in its state."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    record,
    wait_for,
    wait_stream,
)
from torchgpipe.values.structure import ATOMS, flatten, is_dense

__all__: list[str] = []


# Tensors are looked for, and replaced, in tuples, lists and dicts of arguments.


CONTAINERS = (tuple, list, dict, deque)
KNOWN = (Tensor, *CONTAINERS)


def tensors_of(value: Any, objects: list[Any] | None = None) -> list[Tensor]:
    """The tensors that :func:`replaced` replaces.

    Args:
        value: the value.
        objects: a list to which all is added that is neither a tensor, nor a container, nor plain.
    """
    found: list[Tensor] = []
    if type(value) in CONTAINERS or isinstance(value, CONTAINERS):
        _collect(value, found, objects)
    elif isinstance(value, Tensor):
        found.append(value)
    return found


def _collect(value: Any, found: list[Tensor], objects: list[Any] | None) -> None:
    # Most arguments are tensors, and tuples and dicts of them. PyTorch's functions for trees take
    # several times as long.
    for x in value.values() if isinstance(value, dict) else value:
        # Types are asked first, which takes a fifth of the time of isinstance().
        own = type(x)
        if own is Tensor:
            found.append(x)
        elif own in ATOMS:
            continue
        elif own in CONTAINERS or isinstance(x, CONTAINERS):
            _collect(x, found, objects)
        elif isinstance(x, Tensor):
            found.append(x)
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
        # The dict of keyword arguments is made by the call, so the module may fill it.
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
    found: Any = None
    if kind in CONTAINERS:
        for key, x in value.items() if kind is dict else enumerate(value):
            # In the order of :func:`_collect`.
            own = type(x)
            if own is Tensor:
                y = function(x)
            elif own in ATOMS:
                continue
            elif own in CONTAINERS or isinstance(x, KNOWN):
                y = map_tensors(function, x, copies, objects)
            else:
                if objects is not None:
                    objects.append(x)
                continue
            if y is not x:
                if found is None:
                    found = [*value] if kind is tuple else value.copy()
                found[key] = y
        if kind is tuple and found is not None:
            return tuple(found)
    elif isinstance(value, Tensor):
        return function(value)
    elif isinstance(value, CONTAINERS):
        # PyTorch may not know the class, which matters only if a tensor is replaced.
        others = {id(x): y for x in tensors_of(value, objects) if (y := function(x)) is not x}
        if others:
            tensors, structure = flatten(value)
            found = structure.unflatten(tuple([others.get(id(x), x) for x in tensors]))
    if found is None:
        return value
    if copies is not None:
        copies.append(found)
    return found


class handing_back:
    """Do to lists, dicts and objects what a module does to its copies of them in a ``with`` block.

    Args:
        value: what the module was to be called with.
        copy: the same with tensors of the module's device, in copies of what holds them.
    """

    def __init__(self, value: Any, copy: Any) -> None:
        #: What holds tensors, and its copy.
        self._found: list[tuple[Any, Any]] = []
        #: An element of a copy, its version, and what is in its place, by the element's identity.
        self._own: dict[int, tuple[Any, int, Any]] = {}
        self._compare(value, copy)

    def _compare(self, value: Any, copy: Any) -> None:
        if value is copy:
            return
        value, copy = (x if isinstance(x, CONTAINERS) else _container(x) for x in (value, copy))
        if value is not None:
            if not isinstance(value, tuple):
                self._found.append((value, copy))
            for x, y in zip(_elements(value), _elements(copy)):
                self._own[id(y)] = y, _version(y), x
                self._compare(x, y)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Do it: a tensor that the module has changed in place replaces the original."""
        for value, copy in self._found:
            wanted = [self._original(x) for x in _elements(copy)]
            if not _same(_elements(value), wanted):
                fill(value, wanted)

    def _original(self, x: Any) -> Any:
        _, version, own = self._own.get(id(x), (x, None, x))
        return own if version == _version(x) else x


def _version(x: Any) -> int:
    return version_of(x) if isinstance(x, Tensor) else 0


# Contents that the model's code puts into lists, dicts and plain objects of a mapped module.
#
# ::
#
#   self.block.state["mask"] = mask
#   x = self.block(x)
#
# The dict stays where it is, so its identity tells nothing. A snapshot holds its elements, and
# theirs in turn, by identity. It looks into Python's own containers, and into objects of classes
# that set attributes in the plain way.


#: How deep snapshots look, and at how many values. What is larger is not looked into.
DEPTH, COUNT = 6, 1000

_SEQUENCES = (list, deque, set)
_DICTS = (dict, OrderedDict, defaultdict)

#: Where classes are defined whose objects are not looked into: functions and modules of Python have
#: attributes, too, and the calls of mapped modules refer to what lasts.
_OTHERS = ("builtins", "torch", "torchgpipe", "threading", "logging")

#: A container, and its elements; of a dict, or of the attributes of an object, keys and values.
Content: TypeAlias = tuple[Any, list[Any]]

#: A container, elements that it had, and whether these are all.
Replaced: TypeAlias = tuple[Any, list[Any], bool]


class Contents(NamedTuple):
    """The containers within a value, with their elements at one time."""

    found: list[Content]

    @classmethod
    def of(cls, value: Any) -> Contents | None:
        """The containers within a value; None if there are none."""
        found: list[Content] = []
        waiting, seen, count = [(value, DEPTH)], set(), 0
        while waiting:
            x, depth = waiting.pop()
            container = _container(x)
            if container is None and type(x) is not tuple:
                continue
            count += len(x if container is None else container)
            if id(x) in seen or depth == 0 or count > COUNT:
                continue
            seen.add(id(x))
            elements = [*x] if container is None else _elements(container)
            if container is not None:
                found.append((container, elements))
            waiting += [(element, depth - 1) for element in elements]
        return cls(found) if found else None

    @property
    def is_changed(self) -> bool:
        """Whether a container has other elements now."""
        return not all(_same(_elements(container), elements) for container, elements in self.found)

    def put(self) -> list[Replaced]:
        """Give the containers these elements; return those they had, of containers that change."""
        before: list[Replaced] = []
        for container, elements in self.found:
            now, whole = _elements(container), True
            # guard: contents of a call
            if _same(now, elements):
                continue
            half = len(now) // 2
            if isinstance(container, dict) and _same(now[:half], elements[: len(elements) // 2]):
                # Only values that differ, since other threads may use the others at the same time.
                pairs = zip(now[:half], now[half:], elements[half:])
                changed = [x for x in pairs if x[1] is not x[2]]
                keys, whole = [key for key, _, _ in changed], False
                now = [*keys, *[had for _, had, _ in changed]]
                elements = [*keys, *[wanted for _, _, wanted in changed]]
            before.append((container, now, whole))
            fill(container, elements, whole)
        return before


def fill(container: Any, elements: list[Any], whole: bool = True) -> None:
    """Give a container other elements.

    Args:
        container: the container.
        elements: the elements; of a dict, the keys and the values.
        whole: whether these are all.
    """
    if isinstance(container, list):
        container[:] = elements
        return
    if whole:
        container.clear()
    if isinstance(container, dict):
        half = len(elements) // 2
        for key, x in zip(elements[:half], elements[half:]):
            # An output of Transformers has no update().
            container[key] = x
    elif isinstance(container, set):
        container.update(elements)
    else:
        container.extend(elements)


def _elements(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    # Sorted, since a set that is filled again may have another order.
    return sorted(container, key=id) if isinstance(container, set) else [*container]


def _same(now: list[Any], before: list[Any]) -> bool:
    # Without comparing objects: tensors on an accelerator would make the host wait.
    return len(now) == len(before) and all(map(is_, now, before))


def _container(x: Any) -> Any:
    """The container that holds the elements of a value, or its attributes; None without any."""
    return x if type(x) in _SEQUENCES or type(x) in _DICTS else attributes_of(x)


def attributes_of(x: Any) -> dict[str, Any] | None:
    """The attributes of a plain object; None of anything else."""
    kind = type(x)
    if kind.__module__.split(".")[0] in _OTHERS or isinstance(x, Tensor | nn.Module):
        return None
    # A class with its own way to set attributes may keep other state in accord with them.
    owners = [owner for owner in kind.__mro__[:-1] if owner is not SimpleNamespace]
    own = any("__setattr__" in vars(owner) for owner in owners)
    found: dict[str, Any] | None = None if own else getattr(x, "__dict__", None)
    return found


# Changes of the model's state by its own code, such as a running mean that its root keeps.
#
# Micro-batches change it one after another, each on the stream of the stage that it has reached.
# A later visit of a device has another stream, which does not wait for the first one. So whatever
# uses changed state next waits for an event after the change.
#
# Mapped modules are called on one stream each, or see to it themselves.


class Changes:
    """The changes of the state of a model in one step.

    Args:
        model: the model. It is not held, since the graph of a step may hold this.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._own: set[int] | None = None
        #: The last change of each storage: an event.
        self.last: dict[int, Any] = {}

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors that are state of the model, or views of it."""
        # A tensor with a ``grad_fn`` was computed from state, and is no state.
        tensors = [x for x in tensors if x.grad_fn is None and is_dense(x)]
        if tensors and self._own is None:
            model = self._model()
            state = [] if model is None else [*model.parameters(), *model.buffers()]
            self._own = {_storage(x) for x in state if is_dense(x)}
        return [x for x in tensors if self._own and _storage(x) in self._own]

    def wait(self, tensors: Iterable[Tensor], stream: AbstractStream | None = None) -> None:
        """Make the streams that use tensors next wait for changes of these.

        Args:
            tensors: any tensors.
            stream: the stream; by default the current one of each tensor's device.
        """
        for x in tensors if self.last else ():
            event = self.last.get(_storage(x)) if is_dense(x) else None
            if event is not None:
                # guard: changes of state
                wait_for(stream or current_stream(x.device), event)

    def begin(
        self,
        state: Iterable[Tensor],
        streams: Callable[[torch.device], Iterable[AbstractStream]],
    ) -> None:
        """Make the streams that change state next wait for all that may use it.

        Args:
            state: the state.
            streams: returns the streams that compute on a device.
        """
        for device in {x.device for x in state}:
            own = current_stream(device)
            for other in streams(device):
                if other != own:
                    # guard: state in use
                    wait_stream(own, other)

    def end(self, state: Iterable[Tensor]) -> None:
        """Take note that state was changed."""
        for x in state:
            event = record(current_stream(x.device))
            if event is not None:
                self.last[_storage(x)] = event


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
