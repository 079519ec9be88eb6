"""Thread-local attributes, registered so that they can be restored after Ctrl-C.

Each room keeps its own: :mod:`torchgpipe.ambient.notes` the layer that runs,
:mod:`torchgpipe.ambient.nesting` how wrappers are nested, :mod:`torchgpipe.recompute.phase` which
run of a cell it is, and :mod:`torchgpipe.skip.tracker` where layers stash and pop.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

__all__: list[str] = []

Local = TypeVar("Local", bound=threading.local)

_registered: list[threading.local] = []


def registered(local: Local) -> Local:
    """Register attributes for :func:`saved` and :func:`put_back`, and return them."""
    _registered.append(local)
    return local


def saved() -> list[dict[str, Any]]:
    """Copies of all registered attributes of this thread."""
    return [dict(vars(local)) for local in _registered]


def put_back(values: list[dict[str, Any]]) -> None:
    """Set all registered attributes of this thread to what :func:`saved` has returned."""
    for local, value in zip(_registered, values):
        vars(local).clear()
        vars(local).update(value)
