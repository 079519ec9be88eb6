"""Ctrl-C: what a thread had set is put back, wherever it was interrupted.

A context manager puts back what it has set, but only once it is entered, and it is Python like
anything else: interrupted just before or just after, it would leave layers of other models in a
mode of ours, or have hooks of ours see what they save.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident, main_thread

import torch
from torch import _C

from torchgpipe.ambient.modes import (
    Modes,
    autocast_nesting,
    current_hooks,
    leave_autocast,
    pop_all,
    push,
    set_values,
)
from torchgpipe.ambient.running import running
from torchgpipe.devices.streams import current_streams, set_streams

__all__: list[str] = []


class Snapshot:
    """What this thread has set, as far as we set it; put back if a ``with`` block raises.

    Args:
        devices: whose current streams may be changed.
        expected: the modes that it may have, which is found out in less time.
    """

    __slots__ = ("grad", "hooks", "interruptible", "modes", "nesting", "running", "streams")

    def __init__(self, devices: Sequence[torch.device], expected: Modes | None = None) -> None:
        self.grad = torch.is_grad_enabled()
        #: But for the grad mode.
        self.modes = expected if expected and expected.are_current() else Modes.current()
        #: No other thread is interrupted.
        self.interruptible = get_ident() == main_thread().ident
        if self.interruptible:
            self.hooks = current_hooks()
            self.running = dict(vars(running))
            self.streams = current_streams(devices)
            # Where nothing else differs, it stays the same.
            self.nesting = autocast_nesting() if self.modes is not expected else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.interruptible:
            self.put_back()

    def put_back(self) -> None:
        """Sets it again, wherever this thread was interrupted."""
        while current_hooks() not in (None, self.hooks):
            _C._autograd._pop_saved_tensors_default_hooks()
        if not self.modes.are_current():
            pop_all()
            set_values(self.modes, Modes.current())
            push(self.modes)
        _C._set_grad_enabled(self.grad)
        while self.nesting is not None and autocast_nesting() > self.nesting:
            leave_autocast()
        vars(running).clear()
        vars(running).update(self.running)
        set_streams(self.streams)
