"""The input and the targets of a step, checked and split where a stage reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchgpipe.distributed.routes import Routes
from torchgpipe.engine.mini_batch import MiniBatch, verify_call
from torchgpipe.executor.links import Streams
from torchgpipe.executor.targets import arguments_of
from torchgpipe.partition.traps import Traps
from torchgpipe.values import microbatch

__all__: list[str] = []


class Given(NamedTuple):
    """The part of a step that the caller gives to this process.

    Args:
        mini_batch: the input; None but for the first stage.
        arguments: the further arguments of the loss, for each micro-batch of the last stage; None
            where none of them tells the number of rows.
        arriving: the events of their copies.
        rows: the number of rows of the mini-batch, as far as this process knows.
    """

    mini_batch: MiniBatch | None
    arguments: Sequence[Any] | None
    arriving: Sequence[Any]
    rows: int

    @property
    def batches(self) -> list[microbatch.Batch]:
        """The micro-batches of the first stage."""
        return [] if self.mini_batch is None else self.mini_batch.batches


NOTHING = Given(None, None, (), 0)


class Reader:
    """The checks and the split of what the caller gives to this process.

    Args:
        routes: in which process each stage is.
        device: the device of this process.
        streams: the streams of copies.
    """

    def __init__(self, routes: Routes, device: torch.device, streams: Streams) -> None:
        self._routes, self._device, self._streams = routes, device, streams

    def read(self, pipe: Any, input: Any, terms: Any, traps: Traps) -> Given:
        """Check and split.

        Args:
            pipe: the wrapper.
            input: the input of the model.
            terms: the further arguments of the loss; None without a loss.
            traps: the warnings of the wrapper.
        """
        mini_batch = None
        if self._routes.is_first:
            mini_batch = self._divided(pipe, input, traps)
        else:
            verify_call(pipe, ())
        rows = 0
        if self._routes.is_first or self._routes.is_last:
            rows = microbatch.row_count(input)
            if not rows and not self._routes.is_first:
                rows = microbatch.row_count(terms)
        arguments: Sequence[Any] | None = None
        arriving: Sequence[Any] = ()
        if self._routes.is_last and terms is not None:
            if pipe.loss is None:
                raise ValueError(
                    "a step needs the loss of each micro-batch (loss: None); pass Pipe(..., "
                    "loss=torch.nn.functional.cross_entropy), for one, or call the model for its "
                    "output"
                )
            if rows or self._routes.is_first:
                arguments, arriving = self.arguments(terms, rows, count(rows, pipe.chunks))
        return Given(mini_batch, arguments, arriving, rows)

    def arguments(self, terms: Any, rows: int, m: int) -> tuple[Sequence[Any], Sequence[Any]]:
        """The further arguments of the loss of each micro-batch, and the events of their copies."""
        sizes = microbatch.divided(rows, m) if m > 1 else []
        return arguments_of(terms, sizes, m, self._streams, self._device)

    def _divided(self, pipe: Any, input: Any, traps: Traps) -> MiniBatch:
        """A mini-batch that can be computed."""
        if input is None:
            raise ValueError(
                "the process of the first stage must be given the input (input: None, rank: "
                f"{self._routes.rank}); pass it in this process at least"
            )
        found = MiniBatch(pipe, input, pipe.chunks, traps)
        for x in found.batches[0]:
            if x.device != self._device:
                raise ValueError(
                    "the input must be on the device of the first stage "
                    f"(first stage: {self._device}, input: {x.device}); pass "
                    "input.to(model.device)"
                )
        return found


def count(rows: int, chunks: int) -> int:
    """The number of micro-batches of so many rows."""
    return max(1, min(rows, chunks)) if rows else 1
