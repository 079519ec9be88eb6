"""Ctrl-C: what a thread has set is put back, wherever it was interrupted.

A context manager puts back what it has set, but only once it is entered, and it is Python like
anything else: interrupted just before or just after, it would leave layers of other models in a
mode of ours, or have hooks of ours see what they save. So what this library sets in the caller's
thread is looked at from outside as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from torchgpipe.context import Modes, current_hooks
from torchgpipe.running import running
from torchgpipe.stream import current_streams, set_streams

__all__: list[str] = []


class unwound:
    """Puts back what this thread had set when a ``with`` block raises, in the main thread.

    No other thread is interrupted.

    Args:
        devices: whose current streams may be changed.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = devices

    def __enter__(self) -> None:
        self.watching = threading.get_ident() == threading.main_thread().ident
        if self.watching:
            self.modes, self.hooks = Modes.current(), current_hooks()
            self.running = dict(vars(running))
            self.streams = current_streams(self.devices)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self.watching:
            return
        while current_hooks() not in (None, self.hooks):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self.modes.put_back()
        vars(running).clear()
        vars(running).update(self.running)
        set_streams(self.streams)
