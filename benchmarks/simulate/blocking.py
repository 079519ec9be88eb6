"""Pipelines of partitions that block the host's threads for random times.

A cell sleeps in its forward and in its backward, like a device whose operators block the host. On
virtual accelerators each device has threads of its own, which sleep side by side even on one
core.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.library import Library
from benchmarks.simulate.critical import Times

__all__ = ["KINDS", "draw", "Block", "Blocks"]

#: Distributions of times.
KINDS = ("constant", "uniform", "exponential")


def draw(kind: str, mean: float, m: int, n: int, numbers: random.Random) -> list[list[float]]:
    """Draw a time for each of ``m`` micro-batches in each of ``n`` partitions."""
    one: Callable[[], float] = {
        "constant": lambda: mean,
        "uniform": lambda: mean * numbers.uniform(0.5, 1.5),
        "exponential": lambda: numbers.expovariate(1 / mean),
    }[kind]
    return [[one() for _ in range(n)] for _ in range(m)]


#: Seconds of a cell in the warm-up, more than it takes to issue the cell.
WARM_UP = 0.004


class Block(nn.Module):
    """A partition that sleeps, and computes ``output = input * weight``.

    Args:
        forward: seconds of the forward of each micro-batch.
        backward: seconds of the backward of each micro-batch.

    Shape:
        ``(1, 1)``. The value of a micro-batch is its number, so the block finds its times in
        whatever order micro-batches come. The number after the last means the warm-up.
    """

    def __init__(self, forward: Sequence[float], backward: Sequence[float]) -> None:
        super().__init__()
        self.times = [*forward, WARM_UP], [*backward, WARM_UP]
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = BlockFunction.apply(input, self.weight, *self.times)
        return output


class BlockFunction(torch.autograd.Function):
    """``input, weight, forward, backward → output``."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, forward: list[float], backward: list[float]
    ) -> Tensor:
        i = int(input)
        ctx.time = backward[i]
        time.sleep(forward[i])
        # A copy is no input of the layer, so a checkpoint has something to recompute.
        ctx.save_for_backward(input.clone(), weight)
        return input * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        time.sleep(ctx.time)
        return grad * weight, (grad * input).sum(0), None, None


class Blocks:
    """A pipeline of blocks, one on each device, in the process of a rival.

    Args:
        library: makes the pipeline.
        mode: which micro-batches are checkpointed.
        forward: seconds of each cell's forward, in row ``i``, column ``j``.
        backward: seconds of each cell's backward in the same way.
    """

    def __init__(self, library: Library, mode: str, forward: Times, backward: Times) -> None:
        m, n = len(forward), len(forward[0])
        devices = library.devices[:n]
        layers = nn.Sequential(*map(Block, zip(*forward), zip(*backward)))
        self.model = library.wrap(layers, [1] * n, devices=devices, chunks=m, checkpoint=mode)
        self.numbers = torch.arange(float(m), device=devices[0]).unsqueeze(1)
        # These steps make threads and streams, allocate gradients, and show that layers block. The
        # one after them is no trial of the slower way to issue cells, as every power of two is.
        for _ in range(5):
            self.model(torch.full_like(self.numbers, m)).sum().backward()

    def seconds(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward of a step."""
        gc.collect()
        gc.disable()
        try:
            start = time.perf_counter()
            loss = self.model(self.numbers).sum()
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
        finally:
            gc.enable()
        return middle - start, end - middle
