"""Snapshots of the objects that layers read, to be compared later.

A snapshot follows all references: containers, attributes, closures of functions, arrays, and the
states of generators. Of a tensor it notes only that there is one: layers that read its values are
not traced at all (:mod:`torchgpipe.graphs.places`).
"""

from __future__ import annotations

import gc
import io
import logging
import pickle
import random
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe.values.structure import ATOMS, MISSING

__all__: list[str] = []

#: The number of objects, and the bytes of an array, that are looked at in each step, at most.
OBJECTS, BYTES = 10_000, 2**20

SEQUENCES = (list, tuple, set, frozenset, deque)
#: Containers without attributes. Objects of their subclasses may have some.
CONTAINERS = frozenset({*SEQUENCES, dict})
#: Objects that stand for something outside of the layers.
OUTSIDE = (type, ModuleType, io.IOBase, logging.Logger)
#: The type of functions that :func:`functools.lru_cache` has made.
Cached: Any = type(lru_cache(lambda: None))


class Snapshot:
    """The numbers, texts and identities that are found in some objects.

    Args:
        values: the objects, each with a name.
        known: the identities of modules that are checked elsewhere.
    """

    def __init__(self, values: Iterable[tuple[str, Any]], known: Collection[int] = ()) -> None:
        self._known = known
        self._seen: dict[int, int] = {}
        #: The types, values and identities, in the order of the search.
        self.found: list[Any] = []
        #: The number of cache misses of each function with an ``lru_cache``.
        self.computed: list[int] = []
        #: The containers whose contents may change, each with the name of the object it is in.
        self.containers: list[tuple[str, Any]] = []
        #: The functions, classes and modules that were reached, and the classes of objects.
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []
        self.modules: list[ModuleType] = []
        self.kinds: dict[type, None] = {}
        #: Objects that are known by their identities, held so that no others get these.
        self._alive: list[Any] = []
        #: The reason why later changes cannot be seen; empty if they can.
        self.fault = ""
        for name, value in values:
            try:
                self._look(name, value)
            except Exception as error:
                # Some objects, such as proxies, raise any error.
                self.fault = f"an object cannot be looked into ({name}: {type(error).__name__})"

    def same(self, other: Snapshot) -> bool:
        """Whether the objects hold the same as those of an earlier snapshot.

        Functions with an ``lru_cache`` may have cached more values, but not dropped any.
        """
        if self.found != other.found or any(map(int.__lt__, self.computed, other.computed)):
            return False
        other.computed = self.computed
        return True

    def _look(self, name: str, value: Any) -> None:
        stack = [value]
        while stack and not self.fault:
            value = stack.pop()
            if type(value) in ATOMS:
                # NaN is not equal to itself, and 0.0 is equal to -0.0.
                self.found += (type(value), (value or str(value)) if value == value else None)
            elif isinstance(value, Tensor):
                self.found.append(Tensor)
                if value.__dict__ and (owned := attributes_of(value)):
                    stack.append(owned)
                    self._alive.append(owned)
            elif id(value) in self._seen:
                self.found.append((id, self._seen[id(value)]))
            elif len(self._seen) == OBJECTS:
                self.fault = f"more than {OBJECTS} objects are in its attributes ({name})"
            else:
                self._seen[id(value)] = len(self._seen)
                self.found.append(type(value))
                stack += reversed([*self._into(name, value)])

    def _into(self, name: str, value: Any) -> Iterable[Any]:
        """Record an object, and return the objects in it."""
        if isinstance(value, SEQUENCES):
            if isinstance(value, list | set | deque):
                self.containers.append((name, value))
            self.found.append(len(value))
            return value if type(value) in CONTAINERS else (*value, *self._attributes(name, value))
        if isinstance(value, dict):
            self.containers.append((name, value))
            self.found += value
            found = value.values()
            return found if type(value) in CONTAINERS else (*found, *self._attributes(name, value))
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, FunctionType):
            self.functions.append(value)
            self.found.append(id(value.__code__))
            cells = map(_content, value.__closure__ or ())
            return *cells, value.__defaults__, value.__kwdefaults__, value.__dict__
        if isinstance(value, CellType):
            return (_content(value),)
        if isinstance(value, ContextVar):
            return (_set(value),)
        if isinstance(value, ReferenceType):
            return (value(),)
        if isinstance(value, MappingProxyType):
            return gc.get_referents(value)
        if _is_array(value) and value.dtype.hasobject:
            self.containers.append((name, Elements(value)))
            self.found.append(value.shape)
            elements: list[Any] = value.ravel().tolist()
            self._alive.append(elements)
            return elements
        contents = _contents(value)
        if contents is not None:
            if len(contents) > BYTES:
                self.fault = f"an array of {len(contents)} bytes is in its attributes ({name})"
            self.found.append(contents)
            return ()
        self.found.append(id(value))
        if isinstance(value, (*OUTSIDE, _torch.CustomOpDef)):
            # A graph calls operators, so what is in their code need not be looked into.
            if isinstance(value, type):
                self.classes.append(value)
            elif isinstance(value, ModuleType):
                self.modules.append(value)
            return ()
        if isinstance(value, nn.Module) and id(value) in self._known:
            return ()
        if hasattr(type(value), "__next__"):
            self.fault = f"an iterator is in its attributes ({name})"
            return ()
        if isinstance(value, Cached):
            self.computed.append(value.cache_info().misses)
        return self._attributes(name, value)

    def _attributes(self, name: str, value: Any) -> Iterable[Any]:
        self.kinds[type(value)] = None
        slots = Slots(value)
        if slots.names:
            self.containers.append((name, slots))
        owned = getattr(value, "__dict__", None)
        if str(type(value).__module__).startswith("torchgpipe."):
            # Private attributes of a wrapper change from step to step.
            owned = {k: x for k, x in (owned or {}).items() if k[0] != "_" or k == "_modules"}
            self._alive.append(owned)
            return (owned,)
        if isinstance(owned, dict):
            return *slots.copy().values(), owned
        if slots.names or isinstance(value, SEQUENCES):
            return slots.copy().values()
        self._alive.append(value)
        # An object of C, whose references only the garbage collector knows.
        return [x for x in gc.get_referents(value) if not isinstance(x, OUTSIDE)]


class Elements:
    """The elements of an array of objects, as a dict that can be copied, cleared and updated."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def copy(self) -> dict[int, Any]:
        """The elements by their numbers."""
        return dict(enumerate(self._array.ravel().tolist()))

    def clear(self) -> None:
        """Do nothing: the elements of an array cannot be removed."""

    def update(self, contents: dict[int, Any]) -> None:
        """Put elements in their places."""
        for k, x in contents.items():
            self._array.flat[k] = x


class Slots:
    """The slots of an object, as a dict that can be copied, cleared and updated.

    Args:
        owner: the object.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kind: Any = type(owner)
        self.names = _slots(kind)

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


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(_slots_of(kind))


def _slots_of(kind: type) -> Iterator[str]:
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
    if _is_array(value):
        return f"{value.dtype} {value.shape} ".encode() + bytes(value.tobytes())
    if type(value).__module__.startswith("numpy.random"):
        return pickle.dumps(value)
    # Memory that processes share, as of multiprocessing.Value, by the last base before ``object``.
    basis, *_ = type(value).__mro__[-2:]
    return bytes(memoryview(value)) if basis.__module__ in ("_ctypes", "mmap") else None


def _is_array(value: Any) -> bool:
    """Whether an object is an array, or a number, of NumPy."""
    # NumPy may not be imported.
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that user code has set on a tensor."""
    # Without the marks that torch.compile sets.
    return {key: x for key, x in tensor.__dict__.items() if not key.startswith("_dynamo")}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The cell of the closure is empty.
        return None


def _set(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        # The context variable was never set.
        return MISSING
