"""Trackers, which keep values from when one layer stashes them until another pops them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torchgpipe._torch.dynamo import uncompiled_before_2_13
from torchgpipe.ambient.thread import registered
from torchgpipe.skip.namespace import Skip, describe
from torchgpipe.values.microbatch import Batch, PackedSkip
from torchgpipe.values.structure import flatten

__all__: list[str] = []


class SkipTracker:
    """The values that were stashed and not popped yet.

    Within a wrapper each run of a partition on a micro-batch has a tracker. It begins with the
    values that the partition will pop, and ends with the values that later partitions will pop.

    Args:
        values: the values that were stashed before.
    """

    def __init__(self, values: Mapping[Skip, Any] | None = None) -> None:
        self.values: dict[Skip, Any] = dict(values) if values else {}

    @classmethod
    def of(cls, batch: Batch) -> SkipTracker:
        """A tracker with the skips of a micro-batch, put together for the layers that pop them."""
        # Most micro-batches have none.
        skips = batch.skips.items() if len(batch.parts) > 1 else ()
        return cls({key: x.structure.unflatten(x.tensors) for key, x in skips})

    def parts(self) -> dict[Skip, PackedSkip]:
        """The values, taken apart; they stay so until they are popped.

        Raises:
            TypeError: a value holds tensors in something that is no known container.
        """
        return {skip: PackedSkip(*flatten(value)) for skip, value in self.values.items()}

    @uncompiled_before_2_13
    def save(self, skip: Skip, value: Any) -> None:
        """Stash a value."""
        self.values[skip] = value

    @uncompiled_before_2_13
    def load(self, skip: Skip) -> Any:
        """Pop a value, and keep no reference to it.

        Raises:
            RuntimeError: the value was not stashed.
        """
        if skip not in self.values:
            raise not_stashed(skip)
        return self.values.pop(skip)


def not_stashed(skip: Skip) -> RuntimeError:
    """The error for a skip that is popped and was not stashed."""
    return RuntimeError(
        "a skip must be stashed by an earlier layer before it is popped "
        f"(skip: {describe(skip)}); run the layers in order, and all of them. Where MappedGPipe "
        "checkpoints modules, stash and pop within one of them, or wrap the layers in a GPipe"
    )


class CurrentTracker(threading.local):
    """The tracker that a thread uses."""

    tracker: SkipTracker | None = None


_current = registered(CurrentTracker())


@uncompiled_before_2_13
def current_skip_tracker() -> SkipTracker:
    """The tracker that this thread uses."""
    if _current.tracker is None:
        # The layers run outside of a wrapper.
        _current.tracker = SkipTracker()
    tracker: SkipTracker = _current.tracker
    return tracker


class use_skip_tracker:
    """Make this thread use a tracker within a ``with`` block."""

    def __init__(self, tracker: SkipTracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        self.previous = _current.tracker
        _current.tracker = self.tracker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.tracker = self.previous
