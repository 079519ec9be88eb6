"""A model in training, in the process of a rival."""

from __future__ import annotations

import gc
from time import perf_counter

import torch

from benchmarks.models.experiments import Model, build, samples
from benchmarks.rivals.library import Library

__all__ = ["Training"]


class Training:
    """A model in training by SGD, on one mini-batch.

    Args:
        library: makes the pipeline.
        model: to train.
        size: of a sample.
        batch: samples in the mini-batch.
        balance: number of layers in each partition, or None for the plain model on one device.
        m: number of micro-batches.
        mode: which micro-batches are checkpointed.
    """

    def __init__(
        self,
        library: Library,
        model: Model,
        size: int,
        batch: int,
        balance: list[int] | None = None,
        m: int | None = None,
        mode: str = "except_last",
    ) -> None:
        torch.manual_seed(0)
        self.devices = library.devices[: len(balance or [0])]
        layers = build(model)
        self.model = (
            layers.to(self.devices[0])
            if balance is None
            else library.wrap(layers, balance, devices=self.devices, chunks=m, checkpoint=mode)
        )
        self.input = samples(model, size, batch, self.devices[0])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def step(self) -> None:
        """Run forward, backward, and the optimizer."""
        self.model(self.input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> list[float]:
        """Seconds of each step."""
        found = []
        gc.collect()
        for _ in range(steps):
            synchronize(self.devices)
            start = perf_counter()
            self.step()
            synchronize(self.devices)
            found.append(perf_counter() - start)
        return found

    def memory(self) -> list[dict[str, int]]:
        """Bytes that a step needs on each device; a first step allocates whatever stays.

        The CPU does not count its memory.
        """
        devices = [*dict.fromkeys(self.devices)]
        self.step()
        gc.collect()
        synchronize(devices)
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        self.step()
        synchronize(devices)
        found = []
        for device in devices:
            parameters = [x for x in self.model.parameters() if x.device == device]
            found.append(
                {
                    "parameters": sum(x.nbytes for x in parameters),
                    "gradients": sum(x.nbytes for x in parameters if x.requires_grad),
                    "peak": torch.accelerator.max_memory_allocated(device),
                }
            )
        return found

    def parameters(self) -> int:
        """Number of parameters."""
        return sum(x.numel() for x in self.model.parameters())


def synchronize(devices: list[torch.device]) -> None:
    """Wait until devices have finished their work."""
    for device in {*devices} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)
