"""Sources: the global variables and class attributes that the code of layers reads.

The bytecode of a function shows which names it looks up, so nothing has to run. The search starts
from the classes of the layers and the objects that they hold, and follows the functions and classes
that the user's code can reach. Code of the standard library, PyTorch and other installed packages
is not searched, and taken for constant.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, lru_cache, partialmethod
from pathlib import Path
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    NoneType,
)
from typing import Any, NamedTuple

import torch

from torchgpipe.graphs.snapshot import Snapshot
from torchgpipe.values.structure import MISSING

__all__: list[str] = []

#: Folders of code that is not the user's.
ROOTS = (
    *{Path(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(Path(path).parent for path in (torch.__file__, Path(__file__).parent)),
)

#: Methods that run in a forward only if the forward may create objects of their class.
SETUP = {"__init__", "__new__", "__post_init__"}
#: Methods that do not run in a forward.
ASIDE = {"__init_subclass__", "__class_getitem__", "__repr__", "__str__", "__dir__", "__del__"}
ASIDE |= {"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__"}

#: Types of class attributes that are functions or descriptors, and no values.
DESCRIPTORS = (
    *(FunctionType, staticmethod, classmethod, property, cached_property, partialmethod, type),
    *(GetSetDescriptorType, MemberDescriptorType),
)


class Names(NamedTuple):
    """The names in the code of a function, and of functions within it.

    Args:
        variables: the global variables.
        attributes: the attributes, of whatever object.
        modules: the modules that it imports.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """Return the names in some code."""
    variables, attributes, modules = set(), set(), set()
    for x in dis.get_instructions(code):
        if x.opname.endswith(("_GLOBAL", "_NAME")) and not x.opname.startswith("IMPORT"):
            variables.add(x.argval)
        elif x.opname == "IMPORT_NAME":
            modules.add(x.argval)
        elif x.opname.endswith(("_ATTR", "_METHOD", "_FROM")):
            attributes.add(x.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = names_in(inner)
            variables |= found.variables
            attributes |= found.attributes
            modules |= found.modules
    return Names(frozenset(variables), frozenset(attributes), frozenset(modules))


class Sources:
    """The global variables, and the attributes of classes, that some objects depend on.

    Args:
        held: these objects, each with a name.
        kinds: the classes of further objects.
        known: the identities of modules that are checked elsewhere.
    """

    def __init__(
        self, held: Iterable[tuple[str, Any]], kinds: Iterable[type], known: Collection[int]
    ) -> None:
        #: The classes of objects, and those that code names.
        self._kinds = dict.fromkeys(kinds)
        self._modules: dict[str, ModuleType] = {}
        #: The attributes that some code names.
        self._attributes = {"forward"}
        self._codes: set[tuple[CodeType, int]] = set()
        #: The classes that code names, so that it may create objects of them.
        self._made: set[type] = set()
        #: The modules and classes that hold the variables, with the names of these.
        self.tables: dict[int, Variables] = {}
        self._methods: set[tuple[type, str]] = set()
        self._classes: dict[type, dict[str, Any]] = {}
        #: The variables to compare by their contents, and those to compare by identity.
        self._inner: list[tuple[Any, str]] = []
        self._outer: list[tuple[Any, str, Any]] = []
        values, size, count = [*held], -1, 0
        while size != self._size:
            size = self._size
            self._follow(Snapshot(values, known))
            # The other variables were followed before, and lead to nothing new.
            found = self.values()
            values, count = found[count:], len(found)
        self._sort()

    @property
    def _size(self) -> int:
        names = len(self._attributes) + len(self._inner) + len(self._outer)
        found = len(self._codes) + len(self._methods) + len(self._modules)
        return names + found + len(self._classes) + len(self._made)

    def values(self) -> list[tuple[str, Any]]:
        """Return the variables to compare by their contents, each with its name."""
        return [(name, table.get(name, MISSING)) for table, name in self._inner]

    def are_same(self) -> bool:
        """Whether all other variables and classes are unchanged."""
        return all(table.get(name, MISSING) is x for table, name, x in self._outer) and all(
            kind.__dict__ == before or _plain(kind.__dict__) == _plain(before)
            for kind, before in self._classes.items()
        )

    def _follow(self, snapshot: Snapshot) -> None:
        for function in snapshot.functions:
            if is_own_file(function.__code__.co_filename):
                self._read(function)
        self._made |= {x for x in snapshot.classes if is_own(x)}
        found = [*snapshot.kinds, *snapshot.classes, *map(type, self._made)]
        self._kinds |= dict.fromkeys(found)
        for kind in self._kinds:
            for base in kind.__mro__:
                if not _is_given(base):
                    self._look(base, kind in self._made)
        self._modules |= {x.__name__: x for x in snapshot.modules if is_own(x)}
        for module in self._modules.values():
            for name in self._attributes & vars(module).keys():
                self._add(vars(module), vars(module), name)
        if self._attributes & {"environ", "getenv"}:
            self._add(vars(os), vars(os), "environ")

    def _read(self, function: FunctionType) -> None:
        code, table = function.__code__, function.__globals__
        if (code, id(table)) in self._codes:
            return
        self._codes.add((code, id(table)))
        names = names_in(code)
        self._attributes |= names.attributes
        # After ``from os import getenv``, the name is a variable.
        self._attributes |= names.variables & {"environ", "getenv"}
        for name in names.variables:
            self._add(table, table, name)
        for name in names.modules:
            module = sys.modules.get(name)
            if module is not None and is_own(module):
                self._modules[name] = module

    def _look(self, kind: type, made: bool) -> None:
        if kind not in self._classes:
            self._classes[kind] = dict(kind.__dict__)
        if not is_own(kind):
            # Of such a class the attributes alone are compared: someone may have replaced one.
            return
        for name, x in self._classes[kind].items():
            if isinstance(x, DESCRIPTORS):
                function = _function_of(x)
                if function is None or (kind, name) in self._methods:
                    continue
                if self._runs(name, made):
                    self._methods.add((kind, name))
                    if is_own_file(function.__code__.co_filename):
                        self._read(function)
                    if _holds(function):
                        self._inner.append(({name: function}, name))
            elif not _is_special(name) and not isinstance(x, str | NoneType):
                self._add(kind, kind.__dict__, name)

    def _runs(self, name: str, made: bool) -> bool:
        """Whether a method may run in a forward."""
        if name in SETUP:
            return made
        return name in self._attributes or (_is_special(name) and name not in ASIDE)

    def _add(self, owner: Any, table: Any, name: str) -> None:
        variables = self.tables.setdefault(id(owner), Variables(owner, table))
        if name in variables.names:
            return
        variables.names.add(name)
        value = table.get(name, MISSING)
        if isinstance(value, FunctionType | ModuleType | type) and not is_own(value):
            self._outer.append((table, name, value))
        else:
            self._inner.append((table, name))

    def _sort(self) -> None:
        """Compare variables in which nothing can change, such as plain functions, by identity."""
        inner, self._inner = self._inner, []
        for table, name in inner:
            value = table.get(name, MISSING)
            fixed = isinstance(value, ModuleType | type) or value is MISSING
            if fixed or (isinstance(value, FunctionType) and not _holds(value)):
                self._outer.append((table, name, value))
            else:
                self._inner.append((table, name))


class Variables:
    """Some variables of a module, or attributes of a class, as a dict that can be restored.

    Args:
        owner: the class, or the namespace of the module.
        table: its namespace.
    """

    def __init__(self, owner: Any, table: Any) -> None:
        self._owner, self._table = owner, table
        self.names: set[str] = set()

    @property
    def owner(self) -> str:
        """The name of the class or the module."""
        own = self._owner.__name__ if isinstance(self._owner, type) else self._table.get("__name__")
        return str(own)

    def copy(self) -> dict[str, Any]:
        """The values of the variables that exist."""
        return {name: self._table[name] for name in self.names if name in self._table}

    def clear(self) -> None:
        """Do nothing: other threads may read the variables in the meantime."""

    def update(self, contents: dict[str, Any]) -> None:
        """Restore all variables."""
        for name in self.names:
            if name not in contents:
                self._set(name, MISSING)
            elif self._table.get(name, MISSING) is not contents[name]:
                self._set(name, contents[name])

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self._owner, type):
            if value is not MISSING:
                setattr(self._owner, name, value)
            elif name in self._table:
                delattr(self._owner, name)
        elif value is not MISSING:
            self._table[name] = value
        else:
            self._table.pop(name, None)


def is_own(value: Any) -> bool:
    """Whether a function, a class or a module is of the user's own code."""
    if isinstance(value, FunctionType) and is_own_file(value.__code__.co_filename):
        return True
    module = value
    if not isinstance(value, ModuleType):
        # A function wrapped by a decorator of a package has the module of the user's function.
        module = sys.modules.get(str(value.__module__))
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") not in sys.builtin_module_names
    return is_own_file(file)


@lru_cache(maxsize=4096)
def is_own_file(path: str) -> bool:
    """Whether a file belongs neither to the standard library nor to an installed package."""
    file = Path(path)
    if path.startswith("<frozen ") or {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    # Not by the beginning of the text: torchgpipe_mine.py beside the package is the user's.
    return not any(file.is_relative_to(root) for root in ROOTS)


def _is_given(kind: type) -> bool:
    """Whether a class is Python's or PyTorch's."""
    package = str(kind.__module__).partition(".")[0]
    return package in ("torch", "torchgpipe", "builtins") or package in sys.stdlib_module_names


def _function_of(descriptor: Any) -> FunctionType | None:
    for key in ("__func__", "fget", "func"):
        descriptor = getattr(descriptor, key, None) or descriptor
    return descriptor if isinstance(descriptor, FunctionType) else None


def _holds(function: FunctionType) -> bool:
    """Whether a function holds values: defaults, a closure or attributes."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return bool(function.__closure__ or function.__dict__ or defaults)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _plain(table: Mapping[str, Any]) -> dict[str, int]:
    """The identities of a class's attributes, without those that Python maintains."""
    return {name: id(x) for name, x in table.items() if not name.startswith("__anno")}
