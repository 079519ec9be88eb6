"""The figures of a Trainer's step: how long devices are idle, their memory, and a timeline."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from torchgpipe.checks import verify
from torchgpipe.devices.recorder import memory_total, peak_memory
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.partition.arguments import checked_count
from torchgpipe.show.timeline import Timeline
from torchgpipe.tracing import trace

__all__: list[str] = []


logger = logging.getLogger("torchgpipe")

GIB = 2**30


class Idleness(NamedTuple):
    """The figures of an optimizer step.

    Args:
        devices: the devices that the model is on.
        groups: the sizes of the micro-batches that went through them in one call, for each call.
        slices: how many slices their sequences were divided into.
    """

    devices: list[torch.device]
    groups: list[list[int]]
    slices: int = 1

    @property
    def bubble(self) -> float:
        """The share of a step in which a device waits, by GPipe's schedule with even blocks."""
        waits = (len(self.devices) - 1) * len(self.groups)
        return waits / (sum(map(len, self.groups)) * self.slices + waits)

    @property
    def peak(self) -> tuple[int, torch.device] | None:
        """The most bytes that an accelerator had allocated since the process began, and which."""
        peaks = [(most, x) for x in self.devices if (most := peak_memory(x)) is not None]
        return max(peaks, key=lambda x: x[0], default=None)

    def line(self) -> str:
        """The figures as a line of text."""
        sizes, groups = [*chain(*self.groups)], len(self.groups)
        text = (
            f"{counted(len(self.devices), 'device')}, {counted(len(sizes), 'micro-batch')} of "
            f"{counted(round(sum(sizes) / len(sizes)), 'row')}"
            f"{f' in {self.slices} slices' * (self.slices > 1)}"
            f"{f', in {groups} groups' * (groups > 1)}: bubble {self.bubble:.0%}"
        )
        if self.peak is None:
            return text
        most, device = self.peak
        whole = memory_total(device)
        # ``memory_total`` is infinity for a device that does not tell how much memory it has.
        limit = f" of {whole / GIB:.0f}" if isfinite(whole) else ""
        return f"{text}, peak {most / GIB:.1f}{limit} GiB on {device}"

    def logs(self) -> dict[str, float]:
        """The figures as Trainers log them."""
        logs = {"pipeline/bubble": self.bubble}
        return logs if self.peak is None else {**logs, "pipeline/peak_gib": self.peak[0] / GIB}


def counted(number: int, name: str) -> str:
    """A number of things, in the singular or the plural."""
    ending = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{ending * (number != 1)}"


class PipelineCallback(TrainerCallback):
    """Log how long devices are idle, and their memory; and look at one step.

    ::

        trainer = pipelined(Trainer)(model=model, args=args, callbacks=[PipelineCallback()], ...)

    Each entry of a pipelined Trainer's logs gets ``pipeline/bubble``, the share of a step in which
    a device waits for others, and ``pipeline/peak_gib``, the most memory that any accelerator had
    allocated. The bubble is that of GPipe's schedule, for blocks that take equally long.

    ::

        trainer = pipelined(Trainer)(..., callbacks=[PipelineCallback(trace=3)])

    The third optimizer step is traced, and its timeline is said after it (:doc:`see`).

    Args:
        trace: the optimizer step to trace, counted from 1. The first one spreads the model.

    Raises:
        TypeError, ValueError: the step is no number from 2 on.
    """

    #: The timeline of the step that was traced; None until then.
    timeline: Timeline | None = None

    def __init__(self, trace: int | None = None) -> None:
        if trace is not None:
            remedy = "the first step spreads the model, so pass trace=2 or a later one"
            checked_count(trace, "trace", "the step to look at", remedy)
            verify(trace > 1, "trace must be a step after the first one", "trace", trace, remedy)
        self._step = trace
        self._tracing = ExitStack()

    def begin(self, step: int, model: MappedGPipe | None) -> None:
        """Begin to trace, if this is the step, or the first one after it that can be traced."""
        # End the trace of an earlier step that raised, and so did not come to ``on_step_end``.
        self._tracing.close()
        if self._step is not None and step >= self._step and model and self.timeline is None:
            # ExitStack ends in reverse order: the trace fills the timeline, then ``_say`` logs it.
            self._tracing.callback(self._say, step)
            self.timeline = self._tracing.enter_context(trace(model))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End the trace of a step, and say its timeline."""
        self._tracing.close()

    def _say(self, step: int) -> None:
        if self.timeline is not None:
            # The timeline begins on a line of its own, since a progress bar may precede the text.
            logger.warning(f"optimizer step {step}:\n{self.timeline}")
