"""Notes on exceptions, with partition, micro-batch and layer, and the line that a warning names."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from torchgpipe.ambient import labels
from torchgpipe.ambient.thread import registered

__all__: list[str] = []


class CurrentLayer(threading.local):
    """The layer that a thread runs; after the layer has failed, too."""

    #: The layer's name in the module; None between layers.
    name: str | None = None
    #: The name of the layer's class.
    kind: str | None = None
    #: A function to call when a layer has run.
    then: Callable[[], None] | None = None
    #: A function to call with the output of a layer, before ``then``.
    visit: Callable[[Any], None] | None = None


layer = registered(CurrentLayer())


class noted:
    """Add a note to what is raised within a ``with`` block, and let it pass.

    If a layer raised it, the note also names the layer.

    Args:
        note: the note, or an object whose ``str()`` is the note, called only when needed.
        label: the label of the work within the block; None without an observation.
    """

    def __init__(self, note: object, label: labels.Label | None = None) -> None:
        self.note, self.label = note, label

    def __enter__(self) -> None:
        self.outer, layer.name = layer.name, None
        if self.label is not None:
            self.outer_label = labels.put(self.label)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        name, layer.name = layer.name, self.outer
        if self.label is not None:
            labels.put(self.outer_label)
        if error is not None:
            # An exception that takes no notes stays without one.
            with suppress(Exception):
                add_note(error, f"{self.note}" + (f", layer {name} ({layer.kind})" if name else ""))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once; before Python 3.11, as a cause that bears the note."""
    if sys.version_info >= (3, 11):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif getattr(error.__cause__, "args", None) != (note,):
        cause = RuntimeError(note)
        # So the traceback still shows the exception's own cause.
        cause.__cause__ = error.__cause__
        cause.__context__ = error.__context__
        cause.__suppress_context__ = error.__suppress_context__
        error.__cause__ = cause


def is_noted(error: BaseException) -> bool:
    """Whether an exception bears a note of ours already."""
    notes = [*getattr(error, "__notes__", ()), *getattr(error.__cause__, "args", ())]
    return any(isinstance(x, str) and x.startswith("raised in ") for x in notes)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the caller that is neither PyTorch's nor ours."""
    level, frame = 1, sys._getframe()
    ours = ("torch", "torchgpipe")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
