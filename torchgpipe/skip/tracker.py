"""Trackers: where layers stash tensors, and pop them from."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from torch import Tensor

from torchgpipe.skip.namespace import Skip, describe

__all__: list[str] = []


class SkipTracker:
    """The tensors that were stashed and not popped yet.

    Within a wrapper there is one for each run of a partition on a micro-batch. It has what the
    partition is going to pop, and in the end, what later ones will.

    Args:
        tensors: what was stashed before.
    """

    def __init__(self, tensors: Mapping[Skip, Tensor | None] | None = None) -> None:
        self.tensors: dict[Skip, Tensor | None] = dict(tensors or {})

    def save(self, skip: Skip, tensor: Tensor | None) -> None:
        """Stashes a tensor."""
        self.tensors[skip] = tensor

    def load(self, skip: Skip) -> Tensor | None:
        """Pops a tensor, and lets go of it.

        Raises:
            RuntimeError: it was not stashed.
        """
        if skip not in self.tensors:
            raise RuntimeError(
                "a skip must be stashed by an earlier layer before it is popped "
                f"(skip: {describe(skip)}); run the layers in order, and all of them"
            )
        return self.tensors.pop(skip)


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        # Of layers that run outside of a wrapper.
        self.tracker = SkipTracker()


_thread_local = _ThreadLocal()


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread."""
    return _thread_local.tracker


class use_skip_tracker:
    """Makes a tracker the one of this thread within a ``with`` block."""

    def __init__(self, tracker: SkipTracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        self.previous = _thread_local.tracker
        _thread_local.tracker = self.tracker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread_local.tracker = self.previous
