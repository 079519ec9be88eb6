"""Notes on exceptions: where it was that a layer raised one."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType

from torchgpipe.ambient.running import running

__all__: list[str] = []


class Named:
    """Adds a note to what is raised within a ``with`` block, and lets it pass.

    The note also names the layer that has raised it, if it was one.
    """

    def __init__(self, note: str) -> None:
        self.note = note

    def __enter__(self) -> None:
        self.outer, running.layer = running.layer, None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        layer, running.layer = running.layer, self.outer
        if error is not None:
            # An exception that takes none comes without.
            with suppress(Exception):
                add_note(error, self.note + (f", layer {layer} ({running.kind})" if layer else ""))


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, once; before Python 3.11, as a cause that bears it."""
    if sys.version_info >= (3, 11):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif getattr(error.__cause__, "args", None) != (note,):
        cause = RuntimeError(note)
        # What would have been shown as the reason still is.
        cause.__cause__ = error.__cause__
        cause.__context__ = error.__context__
        cause.__suppress_context__ = error.__suppress_context__
        error.__cause__ = cause
