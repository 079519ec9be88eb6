"""Steps of a schedule whose stages cost what a table says, on virtual accelerators.

A stage spends the time of its F, I and W, and keeps one piece of memory from F until its backward.
So a step shows the idle time and the memory of a schedule as it runs, and not of a simulation.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.schedule import named
from torchgpipe.testing import Busy, observe

__all__ = ["Run", "run"]

#: Bytes that a worker keeps for a micro-batch: so many that all else is nothing beside them.
PIECE = 2**16


class Run(NamedTuple):
    """The times and the memory of a step."""

    longest: float
    """The longest span of a worker, from its first computation to its last one."""
    makespan: float
    """The time of the step."""
    idle: float
    """The longest time within the step in which a worker computes nothing."""
    kept: float
    """Micro-batches whose activations the fullest worker keeps."""


class _Keep(torch.autograd.Function):
    """``input, bytes → input``: keep so many bytes until backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bytes: int) -> Tensor:
        ctx.save_for_backward(torch.empty(bytes, dtype=torch.uint8, device=input.device))
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Stage(nn.Module):
    """A stage with a part of its worker's costs, which it keeps for each micro-batch."""

    def __init__(self, times: tuple[float, float, float], parts: int) -> None:
        super().__init__()
        self.busy, self.bytes = Busy(*[time / parts for time in times]), PIECE // parts

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Keep.apply(self.busy(input), self.bytes)
        return output


def run(
    name: str,
    devices: Sequence[torch.device],
    chunks: int,
    times: tuple[float, float, float],
    copy: float = 0,
) -> Run:
    """Run a step.

    Args:
        name: of the schedule.
        devices: virtual accelerators, each a worker with as many stages as the schedule has.
        chunks: the number of micro-batches.
        times: of F, I and W of all stages of a worker.
        copy: the time of a copy from worker to worker.
    """
    workers = len(devices)
    places = [devices[worker] for worker in named(name, workers, chunks).placement]
    layers = nn.Sequential(*[Stage(times, len(places) // workers) for _ in places])
    options: Any = {"devices": places, "chunks": chunks, "checkpoint": "never"}
    training = ScheduledLoss(GPipe(layers, [1] * len(places), **options), _mean, name)
    # The input needs a gradient, as that of a stage before it would.
    input = torch.rand(chunks, 1, device=places[0], requires_grad=True)
    target = torch.zeros(chunks, 1, device=places[-1])
    # What others have there does not count, and is not freed meanwhile.
    gc.collect()
    before = [torch.accelerator.memory_allocated(device) for device in devices]
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
    # A micro-batch has four bytes.
    links: Any = dict.fromkeys(pairs, 4 / copy) if copy else {}
    with observe(bandwidth=links) as seen:
        loss = training(input, target)
    assert not seen.races
    peaks = [torch.accelerator.max_memory_allocated(device) for device in devices]
    kept = max(peak - own for peak, own in zip(peaks, before)) / PIECE
    loss.backward()
    step = seen.timeline
    workers_of = {span.stream.device for span in step.spans}
    own = [[x for x in step.spans if x.computes and x.stream.device == w] for w in workers_of]
    longest = max(max(x.end for x in spans) - min(x.start for x in spans) for spans in own)
    bubble = max(share.bubble for share in step.shares)
    return Run(longest, step.makespan, bubble * step.makespan, round(kept, 1))


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()
