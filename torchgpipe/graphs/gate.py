"""The gate: either one thread traces a stage, or any number of threads compute.

Tracing replaces the weights by fake tensors. And while a thread traces, PyTorch refuses to run
compiled code in any thread. Its compiler traces, too, when a compiled part runs for the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from torchgpipe.ambient.notes import contextmanager

__all__: list[str] = []


class Gate:
    """A shared lock: any number of computing threads hold it together, or one that traces, alone.

    As a context manager it is held to compute. A thread that holds it may take it again, in either
    way: a part of a graph is made within the cell that first needs it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: For each thread that computes, by its id, the number of its nested ``with gate`` blocks.
        self._computing: dict[int, int] = {}
        self.tracer: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while self.tracer not in (None, me):
                self._changed.wait()
            self._computing[me] = self._computing.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self._changed:
            self._computing[me] -= 1
            if not self._computing[me]:
                del self._computing[me]
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace within a ``with`` block, which begins as soon as no other thread computes."""
        me = threading.get_ident()
        with self._changed:
            # While a thread waits to trace, it does not count as computing. Otherwise two computing
            # threads that want to trace would wait for each other.
            blocks = self._computing.pop(me, 0)
            self._changed.notify_all()
            try:
                while self._computing or self.tracer not in (None, me):
                    self._changed.wait()
                self.tracer = me
                self._depth += 1
            finally:
                if blocks:
                    self._computing[me] = blocks
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self.tracer = None
                    self._changed.notify_all()


#: The only gate of the process, for all stages: PyTorch's tracer is not thread-safe.
gate = Gate()
