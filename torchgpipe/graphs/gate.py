"""A gate: either one thread traces a stage, or any number of threads compute.

Tracing puts other tensors in the places of weights. And while a thread traces, PyTorch's compiler
refuses to run what it has compiled, in whichever thread that is.
"""

from __future__ import annotations

import threading

__all__: list[str] = []


class Gate:
    """A lock that threads which compute share, and a thread that traces has alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computing = 0
        self._tracer: int | None = None
        self._depth = 0
        self.computing = Computing(self)

    def __enter__(self) -> None:
        """Begin to trace, as soon as nobody computes; a thread may do so within itself."""
        me = threading.get_ident()
        with self._changed:
            while self._tracer != me and (self._computing or self._tracer is not None):
                self._changed.wait()
            self._tracer = me
            self._depth += 1

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
        gate = self._gate
        with gate._changed:
            while gate._tracer is not None:
                gate._changed.wait()
            gate._computing += 1

    def __exit__(self, *_: object) -> None:
        gate = self._gate
        with gate._changed:
            gate._computing -= 1
            if not gate._computing:
                gate._changed.notify_all()


#: That of all stages, since PyTorch's tracer is not for several threads.
gate = Gate()
