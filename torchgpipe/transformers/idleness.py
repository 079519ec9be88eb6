"""The figures of a Trainer's step: how long devices are idle, and their memory."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import torch
from transformers import TrainerCallback

from torchgpipe.devices.recorder import memory_total, peak_memory

__all__: list[str] = []


#: The bytes of a GiB.
GIB = 2**30


class Idleness(NamedTuple):
    """The figures of an optimizer step.

    Args:
        devices: the devices that the model is on.
        micro_batches: how many micro-batches went through them in one call.
        rows: how many rows these had.
        slices: how many slices their sequences were divided into.
    """

    devices: list[torch.device]
    micro_batches: int
    rows: int
    slices: int = 1

    @property
    def bubble(self) -> float:
        """The share of a step in which a device waits, by GPipe's schedule with even blocks."""
        others = len(self.devices) - 1
        return others / (self.micro_batches * self.slices + others)

    @property
    def peak(self) -> tuple[int, torch.device] | None:
        """The most bytes that an accelerator had allocated since the process began, and which."""
        found = [(most, x) for x in self.devices if (most := peak_memory(x)) is not None]
        return max(found, key=lambda x: x[0], default=None)

    def line(self) -> str:
        """The figures as a line of text."""
        rows = round(self.rows / self.micro_batches)
        text = (
            f"{len(self.devices)} devices, {self.micro_batches} micro-batches of {rows} "
            f"row{'s' * (rows != 1)}{f' in {self.slices} slices' * (self.slices > 1)}: "
            f"bubble {self.bubble:.0%}"
        )
        if self.peak is None:
            return text
        most, device = self.peak
        whole = memory_total(device)
        # Not every device says how much it has.
        limit = f" of {whole / GIB:.0f}" if isfinite(whole) else ""
        return f"{text}, peak {most / GIB:.1f}{limit} GiB on {device}"

    def logs(self) -> dict[str, float]:
        """The figures as Trainers log them."""
        found = {"pipeline/bubble": self.bubble}
        return found if self.peak is None else {**found, "pipeline/peak_gib": self.peak[0] / GIB}


class PipelineCallback(TrainerCallback):
    """Log how long devices are idle, and their memory.

    ::

        trainer = pipelined(Trainer)(model=model, args=args, callbacks=[PipelineCallback()], ...)

    Each entry of a pipelined Trainer's logs gets ``pipeline/bubble``, the share of a step in which
    a device waits for others, and ``pipeline/peak_gib``, the most memory that any accelerator had
    allocated. The bubble is that of GPipe's schedule, for blocks that take equally long;
    :func:`torchgpipe.trace` measures it.
    """
