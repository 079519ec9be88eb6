"""The settings that all wrappers have, and that may be changed between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.partition.arguments import (
    Modes,
    checked_chunks,
    checked_modes,
    checkpointed,
)

__all__: list[str] = []


class Settings:
    """A base of the wrappers, for the numbers and modes that they have in common."""

    _chunks: int
    _checkpoint: Modes

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(type(self), name, None)
        if isinstance(value, nn.Module) and isinstance(found, property):
            # A module would be registered by this name, past the check.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def _partition_count(self) -> int | None:
        """The number of partitions; None if all of the model has one checkpoint mode."""
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        """The number of micro-batches that a mini-batch is split into, if it has as many rows."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = checked_chunks(chunks)
        self._rechunked()

    def _traced(self) -> tuple[Any, list[torch.device]]:
        """The object that holds the spans of a trace, and the devices."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The .to(device), .cuda() and the like of this module, and of a parent, call this.
        _, devices = self._traced()
        for device in dict.fromkeys(devices):
            if fn(torch.empty(0, device=device)).device != device:
                raise moving_denied()
        return nn.Module._apply(self, fn, recurse)  # type: ignore[arg-type]

    def _rechunked(self) -> None:
        """Take note of another number of micro-batches."""

    @property
    def checkpoint(self) -> str | list[str]:
        """The choice of checkpointed micro-batches: ``always``, ``except_last`` or ``never``.

        A list has a mode for each partition. To change one, assign the list anew.
        """
        # A new list, so that nobody changes ours.
        return self._checkpoint if isinstance(self._checkpoint, str) else [*self._checkpoint]

    @checkpoint.setter
    def checkpoint(self, checkpoint: str | Sequence[str]) -> None:
        self._checkpoint = checked_modes(checkpoint, self._partition_count)

    def extra_repr(self) -> str:
        """The settings, for the first line of ``repr()``."""
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}"

    @property
    def _modes(self) -> list[str]:
        """The checkpoint mode of each partition."""
        modes = self._checkpoint
        return [modes] * (self._partition_count or 1) if isinstance(modes, str) else [*modes]

    def _checkpointed(self, m: int) -> list[int]:
        """For each partition the number of micro-batches, from the first, to be checkpointed."""
        return [checkpointed(mode, m) for mode in self._modes]


def moving_denied() -> TypeError:
    """The error where a wrapper shall be moved."""
    return TypeError(
        "the layers of a wrapper must stay on their devices, so it cannot be moved; move the model "
        "before wrapping it, or wrap it anew with other devices"
    )
