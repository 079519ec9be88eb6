"""Snapshots of objects that layers read: what they hold, to be compared later.

Objects are looked into as far as they reach: containers, attributes, what functions have closed
over, arrays, and the state of generators. Of tensors only their being there counts.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from torchgpipe.values.structure import ATOMS

__all__: list[str] = []

#: The number of objects, and the bytes of an array, that are looked at in each step, at most.
OBJECTS, BYTES = 10_000, 2**20

SEQUENCES = (list, tuple, set, frozenset, deque)
#: Objects that stand for something outside of the layers.
OUTSIDE = (type, ModuleType, io.IOBase, logging.Logger)

MISSING: Any = object()


class Snapshot:
    """The numbers, texts and identities that some objects hold.

    Args:
        values: the objects, each with a name.
        known: the identities of modules that somebody else looks at.
    """

    def __init__(self, values: Iterable[tuple[str, Any]], known: Collection[int] = ()) -> None:
        self._known = known
        self._seen: dict[int, int] = {}
        #: What was found, in the order of looking.
        self.found: list[Any] = []
        #: The containers whose contents may change, each with the name of the object it is in.
        self.containers: list[tuple[str, Any]] = []
        #: Why nobody can tell later whether something has changed, if that is so.
        self.fault = ""
        for name, value in values:
            self._look(name, value)

    def same(self, other: Snapshot) -> bool:
        """Whether the objects hold the same as those of another snapshot."""
        return self.found == other.found

    def _look(self, name: str, value: Any) -> None:
        stack = [value]
        while stack and not self.fault:
            value = stack.pop()
            if type(value) in ATOMS:
                # One that is not a number is not equal to itself.
                self.found += (type(value), value if value == value else None)
            elif isinstance(value, Tensor):
                self.found.append(Tensor)
            elif id(value) in self._seen:
                self.found.append((id, self._seen[id(value)]))
            elif len(self._seen) == OBJECTS:
                self.fault = f"more than {OBJECTS} objects are in its attributes ({name})"
            else:
                self._seen[id(value)] = len(self._seen)
                self.found.append(type(value))
                stack += reversed([*self._into(name, value)])

    def _into(self, name: str, value: Any) -> Iterable[Any]:
        """Note what an object is, and return what is in it."""
        if isinstance(value, SEQUENCES):
            if isinstance(value, list | set | deque):
                self.containers.append((name, value))
            self.found.append(len(value))
            return value
        if isinstance(value, dict):
            self.containers.append((name, value))
            self.found += value
            return value.values()
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, FunctionType):
            self.found.append(id(value.__code__))
            cells = map(_content, value.__closure__ or ())
            return *cells, value.__defaults__, value.__kwdefaults__, value.__dict__
        contents = _contents(value)
        if contents is not None:
            if len(contents) > BYTES:
                self.fault = f"an array of {len(contents)} bytes is in its attributes ({name})"
            self.found.append(contents)
            return ()
        self.found.append(id(value))
        if isinstance(value, OUTSIDE):
            return ()
        if isinstance(value, nn.Module) and id(value) in self._known:
            return ()
        if hasattr(type(value), "__next__"):
            self.fault = f"an iterator is in its attributes ({name})"
            return ()
        slots = Slots(value)
        if slots.names:
            self.containers.append((name, slots))
        owned = getattr(value, "__dict__", None)
        return *slots.copy().values(), owned if isinstance(owned, dict) else None


class Slots:
    """The slots of an object, as a dict that can be copied, cleared and updated.

    Args:
        owner: the object.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.names = [*_slots(type(owner))]

    def copy(self) -> dict[str, Any]:
        """The contents of all slots that are not empty."""
        found = {name: getattr(self._owner, name, MISSING) for name in self.names}
        return {name: x for name, x in found.items() if x is not MISSING}

    def clear(self) -> None:
        """Empty all slots."""
        for name in self.copy():
            object.__delattr__(self._owner, name)

    def update(self, contents: dict[str, Any]) -> None:
        """Fill slots."""
        for name, x in contents.items():
            object.__setattr__(self._owner, name, x)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name


def _contents(value: Any) -> bytes | None:
    """The numbers of an array, or the state of a generator; None for other objects."""
    if isinstance(value, random.Random):
        return str(value.getstate()).encode()
    if isinstance(value, bytes | bytearray | array):
        return bytes(value)
    # Nobody has to have NumPy.
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    if hasattr(value, "tobytes"):
        return f"{value.dtype} {value.shape} ".encode() + bytes(value.tobytes())
    return pickle.dumps(value) if type(value).__module__.startswith("numpy.random") else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing was put there so far.
        return None
