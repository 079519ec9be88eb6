"""Pickling of classes that are created at run time, and have no importable name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__: list[str] = []


def picklable(cls: Any, make: Callable[..., Any], *args: Any) -> Any:
    """Make instances of a class picklable, though pickle does not find the class by its name.

    Instances of subclasses are pickled in the ordinary way.

    Args:
        cls: the class.
        make: a function with a name in a module. ``make(*args)`` returns the class, each time.
        *args: objects that can be pickled.

    Returns:
        The class.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        found = super(cls, self).__reduce_ex__(protocol)
        return (_new, (make, *args), *found[2:]) if type(self) is cls else found

    cls.__reduce_ex__ = reduce
    return cls


def _new(make: Callable[..., Any], *args: Any) -> Any:
    cls = make(*args)
    return cls.__new__(cls)
