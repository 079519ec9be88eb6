"""What one would use without a pipeline: gradient accumulation, and ``nn.DataParallel``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.rivals.library import Library
from benchmarks.rivals.training import Training

__all__ = ["Accumulation", "Replicas"]


class Accumulation(Training):
    """The plain model on one device, trained on micro-batches one after another.

    Args:
        library: where the device comes from.
        m: how many micro-batches.
        arguments: others of :class:`Training`; those of a pipeline do not count.
    """

    def __init__(
        self, library: Library, m: int, balance: list[int], mode: str, **arguments: Any
    ) -> None:
        super().__init__(library, **arguments)
        self.micro_batches = self.input.tensor_split(m)

    def step(self) -> None:
        for input in self.micro_batches:
            loss = self.model(input).square().mean()
            (loss * len(input) / len(self.input)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Replicas(Training):
    """A model in training by ``nn.DataParallel``, on as many GPUs as there are partitions.

    Args:
        library: where the devices come from.
        arguments: those of :class:`Training`; of a pipeline, the number of partitions alone counts.

    Raises:
        ValueError: there are fewer GPUs.
    """

    def __init__(self, library: Library, **arguments: Any) -> None:
        super().__init__(replace(library, wrap=wrap), **arguments)


def wrap(
    layers: nn.Module, balance: list[int], devices: list[torch.device], **pipeline: Any
) -> nn.Module:
    """Stands in for the pipeline of a library."""
    if len({*devices} - {torch.device("cpu")}) < len(devices):
        raise ValueError(f"each replica needs a GPU (devices: {[*map(str, devices)]})")
    return nn.DataParallel(layers.to(devices[0]), devices)
