"""Exceptions on their way out: notes on them, in both directions, and blocks that let them pass."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from torchgpipe.ambient import labels
from torchgpipe.ambient.context import registered

__all__: list[str] = []


class CurrentLayer(threading.local):
    """The layer that a thread runs; after the layer has failed, too.

    It is not registered: an error may leave a block that puts settings back before it leaves the
    one that notes the layer.
    """

    #: The layer's name in the wrapped module; None between layers.
    name: str | None = None
    #: The name of the layer's class.
    kind: str | None = None


class AfterLayer(threading.local):
    """The function that a thread calls when a layer has run."""

    then: Callable[[], None] | None = None


layer = CurrentLayer()
after_layer = registered(AfterLayer())


class noted:
    """Add a note to what is raised within a ``with`` block, and let it pass.

    If a layer raised it, the note also names the layer.

    Args:
        note: the note, or an object whose ``str()`` is the note, called only when needed.
        label: the label of the work within the block; None without an observation.
    """

    def __init__(self, note: object, label: labels.Label | None = None) -> None:
        self.note, self.label = note, label

    def __str__(self) -> str:
        return str(self.note)

    def __enter__(self) -> None:
        self.outer, layer.name = layer.name, None
        if self.label is not None:
            self.outer_label = labels.put(self.label)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            note_layer(error, self)
        layer.name = self.outer
        if self.label is not None:
            labels.put(self.outer_label)


def note_layer(error: BaseException, note: object) -> None:
    """Add a note to an exception, with the layer that this thread runs, if there is one."""
    name = f", layer {layer.name} ({layer.kind})" if layer.name else ""
    # An exception that takes no notes stays without one.
    with suppress(Exception):
        add_note(error, f"{note}{name}")


#: Matches PyTorch's errors about tensors on several devices, to which add_note() adds a remedy.
_DEVICES = re.compile(
    "same device|expected device|current device|different from other tensors|on one device .found"
)


def is_about_devices(error: BaseException) -> bool:
    """Whether an exception is PyTorch's about tensors of several devices."""
    text = error.args[0] if type(error) is RuntimeError and error.args else None
    return isinstance(text, str) and bool(_DEVICES.search(text))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once; before Python 3.11, as a cause that bears the note.

    PyTorch's errors about devices have no remedy, so the note has one.
    """
    if is_about_devices(error) and not is_noted(error):
        note += (
            "; layers must compute with tensors of their own device: pass a tensor as an argument, "
            "register it as a buffer, which moves with the layer, or bring it by .to(x.device)"
        )
    if sys.version_info >= (3, 11):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif getattr(error.__cause__, "args", None) != (note,):
        cause = RuntimeError(note)
        # The exception's own cause becomes the new one's cause, so that a traceback shows both.
        cause.__cause__ = error.__cause__
        cause.__context__ = error.__context__
        cause.__suppress_context__ = error.__suppress_context__
        error.__cause__ = cause


def is_noted(error: BaseException) -> bool:
    """Whether an exception bears a note of ours already."""
    notes = [*entries(error, "__notes__"), *entries(error.__cause__, "args")]
    return any(isinstance(x, str) and x.startswith("raised in ") for x in notes)


def entries(error: BaseException | None, name: str) -> list[Any]:
    """The entries of an attribute of an exception, none where it is missing or cannot be read."""
    try:
        return [*getattr(error, name)]
    except Exception:
        return []


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the caller that is neither PyTorch's nor ours."""
    level, frame = 1, sys._getframe()
    ours = ("torch", "torchgpipe")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


Parameters = ParamSpec("Parameters")
Value = TypeVar("Value", covariant=True)


class Block(AbstractContextManager[Value, None], Generic[Value]):
    """A context manager around a generator with one ``yield``.

    An exception of the block is not thrown into the generator. The generator is closed instead: its
    ``finally`` clauses run, but not the code after its ``yield``. To throw it would set the
    exception's traceback, which fails for an exception without settable attributes, and hides it.
    """

    def __init__(self, generator: Iterator[Value]) -> None:
        self._generator = generator

    def __enter__(self) -> Value:
        return next(self._generator)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            next(self._generator, None)
        else:
            self._generator.close()  # type: ignore[attr-defined]


def contextmanager(
    function: Callable[Parameters, Iterator[Value]],
) -> Callable[Parameters, Block[Value]]:
    """Make context managers of a generator, as :func:`contextlib.contextmanager` does."""

    @wraps(function)
    def made(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Block[Value]:
        return Block(function(*args, **kwargs))

    return made
