"""A gate: either one thread traces a stage, or any number of threads compute.

Tracing replaces the weights by fake tensors. And while a thread traces, PyTorch refuses to run
compiled code in any thread.
"""

from __future__ import annotations

import threading

__all__: list[str] = []


class Gate:
    """A shared lock: any number of computing threads hold it together, or one that traces, alone.

    A thread that holds it may take it again, in either way, as nested wrappers do.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: For each thread that computes, in how many blocks it does, one within the other.
        self._computing: dict[int, int] = {}
        self._tracer: int | None = None
        self._depth = 0
        self.computing = Computing(self)

    def __enter__(self) -> None:
        """Begin to trace, as soon as no other thread computes."""
        me = threading.get_ident()
        with self._changed:
            # This thread gives up its share meanwhile: another one may wait to trace, too.
            own = self._computing.pop(me, 0)
            self._changed.notify_all()
            try:
                while self._computing or self._tracer not in (None, me):
                    self._changed.wait()
                self._tracer = me
                self._depth += 1
            finally:
                if own:
                    self._computing[me] = own

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._tracer = None
                self._changed.notify_all()


class Computing:
    """A block in which a thread computes.

    Args:
        gate: the gate.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        gate, me = self._gate, threading.get_ident()
        with gate._changed:
            while gate._tracer not in (None, me):
                gate._changed.wait()
            gate._computing[me] = gate._computing.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        gate, me = self._gate, threading.get_ident()
        with gate._changed:
            gate._computing[me] -= 1
            if not gate._computing[me]:
                del gate._computing[me]
                gate._changed.notify_all()


#: The gate of all stages, since PyTorch's tracer is not thread-safe.
gate = Gate()
