"""A model in training, in the process of a rival."""

from __future__ import annotations

import gc
from time import perf_counter

import torch

from benchmarks.models.experiments import Model, build, samples
from benchmarks.rivals.library import Library

__all__ = ["Training"]


class Training:
    """A model that is trained by SGD, on data that stays the same.

    Args:
        library: what makes the pipeline.
        model: which one.
        size: of a sample.
        batch: samples in a mini-batch.
        balance: how many layers each partition has, or None for the plain model on one device.
        m: how many micro-batches.
        mode: when checkpoints are made.
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
        """Forward, backward, and what an optimizer does."""
        self.model(self.input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> list[float]:
        """What each of some steps takes."""
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
        """What a step needs on each device, in bytes, once whatever stays has been allocated.

        Devices of the CPU do not count their memory.
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
        """How many parameters there are."""
        return sum(x.numel() for x in self.model.parameters())


def synchronize(devices: list[torch.device]) -> None:
    """Waits until devices have done what they were given."""
    for device in {*devices} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)
