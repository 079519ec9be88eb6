"""The input and the targets of a step, checked and split where a stage reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchgpipe.devices.pool import StreamPool
from torchgpipe.distributed.peers import Routes
from torchgpipe.engine.criterion import arguments_of
from torchgpipe.engine.wrapper import MiniBatch, verify_call
from torchgpipe.values.division import Division, divided, has_chunks, row_count
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class StepInputs(NamedTuple):
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
    def m(self) -> int:
        """The number of micro-batches, negative if the caller has made them; 0 if others know."""
        if self.mini_batch is None:
            return 0
        return -self.mini_batch.m if self.mini_batch.division.is_given else self.mini_batch.m

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches of the first stage."""
        return [] if self.mini_batch is None else self.mini_batch.batches


NOTHING = StepInputs(None, None, (), 0)


class Reader:
    """The checks and the split of what the caller gives to this process.

    Args:
        routes: in which process each stage is.
        device: the device of this process.
        streams: the streams of copies.
    """

    def __init__(self, routes: Routes, device: torch.device, streams: StreamPool) -> None:
        self._routes, self._device, self._streams = routes, device, streams

    def read(self, pipe: Any, input: Any, terms: Any, recorded: bool) -> StepInputs:
        """Check and split.

        Args:
            pipe: the wrapper.
            input: the input of the model.
            terms: the further arguments of the loss; None without a loss.
            recorded: whether the step trains.
        """
        mini_batch = None
        if not self._routes.is_first:
            verify_call(pipe, ())
        elif input is None:
            raise ValueError(
                "the process of the first stage must be given the input (input: None, rank: "
                f"{self._routes.rank}); pass it in this process at least"
            )
        else:
            mini_batch = MiniBatch(pipe, input, recorded)
        rows = 0
        if self._routes.is_first or self._routes.is_last:
            rows = row_count(input)
            if not rows and not self._routes.is_first:
                rows = row_count(terms)
        arguments: Sequence[Any] | None = None
        arriving: Sequence[Any] = ()
        if self._routes.is_last and terms is not None:
            if pipe.loss is None:
                raise ValueError(
                    "a step needs the loss of each micro-batch (loss: None); pass Pipe(..., "
                    "loss=torch.nn.functional.cross_entropy), for one, or call the model for its "
                    "output"
                )
            if mini_batch is not None:
                arguments, arriving = self.arguments(terms, mini_batch.division)
            elif rows and not has_chunks(terms):
                division = Division(divided(rows, max(1, min(rows, pipe.chunks))))
                arguments, arriving = self.arguments(terms, division)
        return StepInputs(mini_batch, arguments, arriving, rows)

    def arguments(self, terms: Any, division: Division) -> tuple[Sequence[Any], Sequence[Any]]:
        """The further arguments of the loss of each micro-batch, and the events of their copies."""
        return arguments_of(terms, division, self._streams, self._device)
