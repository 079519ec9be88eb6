"""The host's time for steps of a pipeline, and of a plain loop, in the process of a rival."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.models.experiments import Model, build, samples
from benchmarks.rivals.cells import in_turn, tiny
from benchmarks.rivals.library import Library

__all__ = ["Host"]

#: Number of micro-batches in the loop, which needs no more of them to find its time.
PLAIN = 2


class Host:
    """A pipeline, and the same layers on one device in a loop over the micro-batches.

    A step is timed until the host has issued it, and does not wait for devices: a forward without
    gradients, or a forward and a backward.

    Args:
        library: makes the pipeline.
        model: whose layers to run, or None for a tiny layer in each partition.
        size: of a sample.
        balance: number of layers in each partition.
        m: number of micro-batches, each of one sample.
        mode: which micro-batches are checkpointed; ``"inference"`` is a forward alone.
    """

    def __init__(
        self,
        library: Library,
        model: Model | None,
        size: int,
        balance: list[int],
        m: int,
        mode: str,
    ) -> None:
        torch.manual_seed(0)
        devices = library.devices[: len(balance)]
        layers = tiny(len(balance)) if model is None else build(model)
        input = torch.randn(m, 2) if model is None else samples(model, size, m, "cpu")
        self.training = mode != "inference"
        layers.train(self.training)
        self.input = input.to(devices[0])
        self.micro_batches = self.input[:PLAIN].split(1)
        self.layers = deepcopy(layers).to(devices[0])
        checkpoint = mode if self.training else "never"
        self.pipeline = library.wrap(
            layers, balance, devices=devices, chunks=m, checkpoint=checkpoint
        )
        self.parameters = [*self.layers.parameters(), *self.pipeline.parameters()]
        self.n, self.m = len(balance), m

    def loop(self) -> None:
        """Step through the layers on one device, one micro-batch after another."""
        self.finish(torch.cat([self.layers(input) for input in self.micro_batches]))

    def step(self) -> None:
        """Step through the pipeline."""
        self.finish(self.pipeline(self.input))

    def finish(self, output: Tensor) -> None:
        """Run the backward of a training."""
        if self.training:
            output.sum().backward()

    def seconds(self, step: Callable[[], None], micro_batches: int) -> float:
        """Drop the gradients of the previous step, and return the seconds of a cell in another."""
        for parameter in self.parameters:
            parameter.grad = None
        with torch.set_grad_enabled(self.training):
            start = perf_counter()
            step()
            return (perf_counter() - start) / (self.n * micro_batches)

    def measure(self, seconds: float, least: int) -> dict[str, dict[str, float]]:
        """Take steps of either in turn, after one that makes streams and threads.

        Returns:
            The least and the median microseconds per cell of ``plain`` and ``pipeline``.
        """
        steps = {
            "plain": lambda: self.seconds(self.loop, len(self.micro_batches)),
            "pipeline": lambda: self.seconds(self.step, self.m),
        }
        for step in steps.values():
            step()
        return in_turn(steps, seconds, 1, least)
