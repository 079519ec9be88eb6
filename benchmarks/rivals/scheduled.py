"""A model in training under an explicit schedule, in the process of a rival."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.rivals.library import Library
from benchmarks.rivals.training import Training

__all__ = ["Scheduled"]


class Scheduled(Training):
    """A training by ``ScheduledLoss``.

    Args:
        library: makes the pipeline; only this checkout, or a later one, has ``ScheduledLoss``.
        schedule: name of the schedule.
        arguments: of :class:`Training`.
    """

    def __init__(self, library: Library, schedule: str, **arguments: Any) -> None:
        super().__init__(library, **arguments)
        # The process of a rival imports its library after this module.
        from torchgpipe import GPipe, ScheduledLoss

        assert isinstance(self.model, GPipe)
        self.loss: nn.Module = ScheduledLoss(self.model, mean_of_squares, schedule)

    def step(self) -> None:
        self.loss(self.input).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def mean_of_squares(output: Tensor) -> Tensor:
    """The loss of all rivals."""
    return output.square().mean()
