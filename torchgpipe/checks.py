"""One wording for what is wrong with arguments: the rule, ``(name: value)``, the remedy.

These checks stand below everything else, and know neither torch nor any class of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from math import inf
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

__all__: list[str] = []

#: The greatest number of stages, workers or micro-batches: more would fill the memory.
MOST = 10**6

#: The classes whose values shown() prints. Other texts may have several lines, or addresses.
SHORT = (str, bytes, Real, complex, type(None), list, tuple, dict, set, frozenset)

#: In characters, the longest text of a value that shown() prints.
WIDTH = 80


def shown(value: Any) -> str:
    """A value in a message: the text of what is short, and the class of anything else."""
    if not isinstance(value, SHORT):
        return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
    try:
        text = repr(value)
    except Exception:
        return type(value).__name__
    # A list is short, but its text has several lines if a tensor is in it.
    return text if len(text) <= WIDTH and "\n" not in text else f"{type(value).__name__}: too long"


def verify(
    valid: object,
    rule: str,
    name: str,
    value: Any,
    remedy: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raise an error of the rule, ``(name: value)`` and the remedy, unless the value is valid."""
    if not valid:
        raise error(f"{rule} ({name}: {shown(value)}); {remedy}")


def verify_kind(
    value: Any, kinds: type | tuple[type, ...], rule: str, name: str, remedy: str
) -> None:
    """Raise a :exc:`TypeError` unless a value is of one of some classes."""
    verify(isinstance(value, kinds), rule, name, value, remedy, TypeError)


def verify_function(value: Any, rule: str, name: str, remedy: str) -> None:
    """Raise a :exc:`TypeError` unless a value can be called."""
    verify(callable(value), rule, name, value, remedy, TypeError)


def checked_flag(value: Any, name: str) -> bool:
    """A choice of two as True or False.

    Raises:
        TypeError: it is neither of them, nor 0, 1 or a truth value of NumPy.
    """
    # NumPy is not imported here, so its truth values are known by the name of their class:
    # ``bool``, or ``bool_`` before NumPy 2.
    known = isinstance(value, int) or type(value).__name__ in ("bool", "bool_")
    remedy = f"pass {name}=True or {name}=False"
    rule = f"{name} is a choice of two"
    verify(known and value in (0, 1), rule, name, value, remedy, TypeError)
    return bool(value)


def verify_number(
    value: Any, rule: str, name: str, remedy: str, *, least: float = 0, above: float = -inf
) -> None:
    """Raise an error unless a value is a finite number from ``least`` on, and more than ``above``.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or out of range.
    """
    verify(is_number(value), rule, name, value, remedy, TypeError)
    verify(finite(value) and value >= least and value > above, rule, name, value, remedy)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, which True is not."""
    # float and int come first: to ask the abstract class Real takes several times as long.
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool)


def finite(value: Any) -> bool:
    """Whether a number is finite, also as a float."""
    try:
        return -inf < float(value) < inf
    except OverflowError:
        return False


def checked_path(path: Any) -> Path:
    """The path of a file.

    Raises:
        TypeError: it is none. The number of an open file, which Python would take, is none either.
    """
    remedy = "pass such as 'step.svg'"
    rule = "a file is named by a text or a path"
    verify_kind(path, (str, PathLike), rule, "path", remedy)
    verify(path != "", rule, "path", path, remedy)
    return Path(path)


def listed(value: Any, rule: str, name: str, remedy: str) -> list[Any]:
    """The entries of a sequence, or of an iterator.

    Raises:
        TypeError: the value has no entries in an order, or is a text or a table.
    """
    has_order = has_entries(value) and not isinstance(value, (str, bytes, Mapping, Set, type))
    verify(has_order, rule, name, value, remedy, TypeError)
    return [*value]


def has_entries(value: Any) -> TypeGuard[Iterable[Any]]:
    """Whether a value has entries; an array without a dimension has none, whatever its class."""
    try:
        return iter(value) is not None and isinstance(value, Iterable)
    except TypeError:
        return False
