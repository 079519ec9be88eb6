"""Trackers: where layers stash values, and pop them from."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torchgpipe._torch.dynamo import uncompiled_before_2_13
from torchgpipe.ambient.running import running
from torchgpipe.skip.namespace import Skip, describe

__all__: list[str] = []


class SkipTracker:
    """The values that were stashed and not popped yet.

    Within a wrapper there is one for each run of a partition on a micro-batch. It has what the
    partition is going to pop, and in the end, what later ones will.

    Args:
        values: what was stashed before.
    """

    def __init__(self, values: Mapping[Skip, Any] | None = None) -> None:
        self.values: dict[Skip, Any] = dict(values or {})

    @uncompiled_before_2_13
    def save(self, skip: Skip, value: Any) -> None:
        """Stashes a value."""
        self.values[skip] = value

    @uncompiled_before_2_13
    def load(self, skip: Skip) -> Any:
        """Pops a value, and lets go of it.

        Raises:
            RuntimeError: it was not stashed.
        """
        if skip not in self.values:
            raise RuntimeError(
                "a skip must be stashed by an earlier layer before it is popped "
                f"(skip: {describe(skip)}); run the layers in order, and all of them"
            )
        return self.values.pop(skip)


@uncompiled_before_2_13
def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread."""
    if running.tracker is None:
        # Of layers that run outside of a wrapper.
        running.tracker = SkipTracker()
    tracker: SkipTracker = running.tracker
    return tracker


class use_skip_tracker:
    """Makes a tracker the one of this thread within a ``with`` block."""

    def __init__(self, tracker: SkipTracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        self.previous = running.tracker
        running.tracker = self.tracker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running.tracker = self.previous
