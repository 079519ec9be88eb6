"""Candidates: ways to train a model, what they are expected to take, and how to wrap it so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchgpipe.engine.stages import stages_of
from torchgpipe.gpipe import GPipe
from torchgpipe.planner.layers import Layer
from torchgpipe.planner.plan import too_large
from torchgpipe.planner.room import Room
from torchgpipe.schedule.simulator import Report
from torchgpipe.scheduled import ScheduledLoss
from torchgpipe.timeline.tables import aligned, in_bytes

__all__ = ["Candidate", "Plans"]


@dataclass(frozen=True)
class Candidate:
    """One way to train a model: how to wrap it, and what that is expected to take; print it.

    Args:
        balance: how many layers each partition takes.
        devices: the device of each partition.
        chunks: the number of micro-batches.
        checkpoint: the checkpoint mode of each partition, or the one of all.
        schedule: the name of the schedule, for :class:`~torchgpipe.ScheduledLoss`; None for the
            order of :class:`~torchgpipe.GPipe`.
        time: milliseconds of a step, without the optimizer and, under ``GPipe``, without the loss.
        memory: the most bytes of each device.
        excess: by how many bytes the fullest device has too little; 0 if the plan fits.
        report: the simulation.
        gap: the excess of the time over the bound for this placement, as a share of the bound.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str | list[str]
    schedule: str | None
    time: float
    memory: dict[torch.device, int]
    excess: int
    report: Report = field(repr=False)
    gap: float
    _loss: Callable[..., Any] | None = field(repr=False)
    _room: Room = field(repr=False)

    @property
    def bubble(self) -> float:
        """The share of the step's time in which devices wait, on average."""
        return float(
            sum(self.report.bubble) / len(self.report.bubble) / (self.report.makespan or 1)
        )

    def wrap(
        self,
        layers: nn.Sequential,
        loss: Callable[..., Any] | None = None,
        *,
        deferred_batch_norm: bool = False,
    ) -> nn.Module:
        """Wrap a model as this candidate says.

        Args:
            layers: the layers that were planned, or others like them.
            loss: the loss, if the candidate has a schedule; by default the one of the plan.

        Keyword Args:
            deferred_batch_norm: as for :class:`~torchgpipe.GPipe`.

        Returns:
            A :class:`~torchgpipe.GPipe`, or a :class:`~torchgpipe.ScheduledLoss` around one.
        """
        model = GPipe(
            layers,
            self.balance,
            devices=self.devices,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            deferred_batch_norm=deferred_batch_norm,
        )
        loss = loss or self._loss
        name = self.schedule if loss is not None else None
        if name == self.schedule:
            stages_of(model).predict(self.time, self.memory, model, name, self._room)
        return model if name is None or loss is None else ScheduledLoss(model, loss, name)

    def __str__(self) -> str:
        placed = f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"
        size = in_bytes(max(self.memory.values()))
        return (
            f"{self.schedule or 'gpipe'}, {placed}: {self.time:.4g} ms a step, {size} on the "
            f"fullest device, bubble {self.bubble:.1%}"
        )

    def _row(self) -> list[str]:
        fullest = max(self.memory.values())
        modes = self.checkpoint
        return [
            self.schedule or "gpipe",
            str(self.chunks),
            str(self.balance),
            modes if isinstance(modes, str) else " ".join(_SHORT[x] for x in modes),
            f"{self.time:.4g}",
            f"{fullest / 2**20:.1f}",
            f"{self.bubble:.1%}",
            f"{self.gap:.1%}",
            "" if not self.excess else f"{in_bytes(self.excess)} too much",
        ]


_SHORT = {"always": "a", "except_last": "e", "never": "n"}


@dataclass(frozen=True)
class Plans:
    """The candidates of :func:`plan`, the fastest first; print it for a table.

    Args:
        candidates: those that fit.
        misfits: those that do not, the nearest to fit first.
        layers: what was measured.
        limits: the bytes that a plan may fill each device with, if there are any: a little less
            than the device may use, by as much as predictions are off.
    """

    candidates: list[Candidate]
    misfits: list[Candidate] = field(repr=False)
    layers: list[Layer] = field(repr=False)
    limits: dict[torch.device, int]

    @property
    def best(self) -> Candidate:
        """The fastest candidate.

        Raises:
            ValueError: none fits.
        """
        if not self.candidates:
            near = self.misfits[0]
            raise too_large(near.schedule, near.chunks, near.balance, near.excess)
        return self.candidates[0]

    def __str__(self) -> str:
        titles = ["schedule", "chunks", "balance", "checkpoint", "ms", "MiB", "bubble", "gap", ""]
        shown = [*self.candidates[:10], *self.misfits[:3]]
        rows = [titles, *(x._row() for x in shown)]
        lines = [aligned(rows, left=range(len(titles)))]
        hidden = len(self.candidates) + len(self.misfits) - len(shown)
        if any(not isinstance(x.checkpoint, str) for x in shown):
            lines.append("checkpoint of each partition: a always, e except_last, n never")
        if self.limits:
            sizes = dict.fromkeys(f"{x / 2**20:.1f}" for x in self.limits.values())
            lines.append(f"a plan fills at most {', '.join(sizes)} MiB of a device")
        return "\n".join([*lines, f"and {hidden} more"] if hidden else lines)
