"""Parcels: the skips of a micro-batch on their way past the stages that do not pop them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchgpipe.skip.tracker import not_stashed
from torchgpipe.values.microbatch import Batch, PackedSkip

__all__: list[str] = []


class Parcels:
    """The skips of one micro-batch that were stashed and not popped yet."""

    def __init__(self) -> None:
        self._waiting: dict[Any, PackedSkip] = {}
        #: The waiting skips that share memory with another part of the micro-batch.
        self._shared: set[Any] = set()

    def unpacked(self, value: Batch, skips: Iterable[Any]) -> Batch:
        """Join a value and waiting skips, for the stage that pops them.

        Raises:
            RuntimeError: a skip was not stashed.
        """
        popped = {}
        for skip in skips:
            # No reference is kept here: a popped skip is freed after its last use.
            # guard: letting go of a skip
            part = self._waiting.pop(skip, None)
            if part is None:
                raise not_stashed(skip)
            popped[skip] = part
        return value.with_skips(popped, self._shared) if popped else value

    def packed(self, output: Batch) -> Batch:
        """Keep the skips of an output; return the value alone, for the next stage."""
        if len(output.parts) == 1 and not (output.shared or self._waiting):
            return output
        value = self.put(output)
        if len(value) < 2 and not self._waiting:
            # Nothing is left that it could share memory with.
            value.shared = frozenset()
        return value

    def put(self, batch: Batch) -> Batch:
        """Keep the skips of a micro-batch; return the value alone."""
        if len(batch.parts) > 1:
            self._waiting.update(batch.skips)
        self._shared |= batch.shared
        return batch.with_skips({})
