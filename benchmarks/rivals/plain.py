"""Training without a pipeline: gradient accumulation, and ``nn.DataParallel``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.rivals.library import Library
from benchmarks.rivals.training import Training

__all__ = ["Accumulation", "Replicas"]


class Accumulation(Training):
    """A training of the plain model on one device, micro-batch after micro-batch.

    Args:
        library: provides the device.
        m: number of micro-batches.
        balance: unused.
        mode: unused.
        arguments: further arguments of :class:`Training`.
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
    """A training by ``nn.DataParallel``, on as many GPUs as there are partitions.

    Args:
        library: provides the devices.
        arguments: of :class:`Training`; the balance only says how many GPUs to use.

    Raises:
        ValueError: there are fewer GPUs than partitions.
    """

    def __init__(self, library: Library, **arguments: Any) -> None:
        super().__init__(replace(library, wrap=wrap), **arguments)


def wrap(
    layers: nn.Module, balance: list[int], devices: list[torch.device], **pipeline: Any
) -> nn.Module:
    """Wrap layers in ``nn.DataParallel``, in place of a library's pipeline."""
    if len({*devices} - {torch.device("cpu")}) < len(devices):
        raise ValueError(f"each replica needs a GPU (devices: {[*map(str, devices)]})")
    return nn.DataParallel(layers.to(devices[0]), devices)
