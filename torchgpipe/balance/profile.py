"""Profiling: the time and the memory that each layer of a sequential module takes.

Layers are copied to the device one after another, put into train mode and run there. The model, its
modes, its buffers and its gradients stay as they are, and so do the random numbers that the caller
draws next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchgpipe.checks import checked_flag, verify, verify_kind
from torchgpipe.devices.streams import CPU, Device, accelerators
from torchgpipe.partition.arguments import MISSING, checked_chunks, checked_device, checked_timeout
from torchgpipe.partition.split import verify_module
from torchgpipe.planner.layers import Layer, measured
from torchgpipe.planner.sandbox import copied, leaves, verify_timed
from torchgpipe.show.tables import aligned, in_bytes
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.values.division import row_count
from torchgpipe.values.microbatch import Batch, scatter
from torchgpipe.values.structure import arguments

__all__ = ["Profile", "detach", "layerwise_sandbox", "profile_layers"]


@dataclass(frozen=True)
class Profile:
    """The time and the memory that layers take on a device; print it for a table."""

    device: torch.device
    #: The rows that the layers were measured with.
    rows: int
    layers: list[Layer]

    def __str__(self) -> str:
        titles = ["layer", "forward ms", "backward ms", "parameters", "activations", "output"]
        rows = [titles]
        for layer in self.layers:
            figures = layer.at(self.rows)
            sizes = layer.weights.parameters, round(figures.left), round(figures.output)
            milliseconds = [f"{x:.3f}" for x in (figures.forward, figures.backward)]
            rows.append([layer.name, *milliseconds, *map(in_bytes, sizes)])
        return aligned(rows)

    def times(self) -> list[float]:
        """The seconds of each layer for forward and backward.

        Raises:
            ValueError: no layer takes any time.
        """
        times = [layer.time(self.rows) / 1000 for layer in self.layers]
        verify_timed(times, self.device, "layers", "on the CPU, by device='cpu'")
        return times


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Generate a copy of each layer, on a device and in train mode, to be used one at a time."""
    for layer in module._modules.values():
        assert layer is not None
        # The copy is in no variable here, so that it is freed before the next one is made.
        yield copied(layer, device)


def detach(batch: Batch) -> None:
    """Detach the tensors of a micro-batch from what they were computed from."""
    batch.parts = leaves(batch).parts


def profile_layers(
    module: nn.Sequential,
    sample: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    chunks: int = 1,
    timeout: float | None = 1.0,
    device: Device | None = None,
    progress: bool = False,
) -> Profile:
    """Measure the time and the memory of each layer, in train mode; print the result for a table.

    Of the sample so many micro-batches are made as ``chunks`` says, and the first one is measured.
    A ``timeout`` of None measures no times, which are 0 then, but only the memory. All else is as
    in :func:`torchgpipe.balance.balance_by_time`, the errors included.
    """
    verify_module(module)
    verify_skippables(module)
    rule = "args must be a tuple of the arguments of the first layer"
    remedy = "pass one argument as the sample, several as args=(...)"
    verify_kind(args, (list, tuple), rule, "args", remedy)
    rule = "kwargs must be the keyword arguments of the first layer"
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    remedy = "pass a dict, by their names"
    verify(kwargs is None or is_named, rule, "kwargs", kwargs, remedy, TypeError)
    chunks = checked_chunks(chunks)
    if timeout is not None:
        checked_timeout(timeout)
    progress = checked_flag(progress, "progress")
    args = args if sample is MISSING else (sample, *args)
    if not (args or kwargs):
        raise TypeError(
            "there must be an input of the first layer to measure with (sample: missing, args: (), "
            "kwargs: None); pass a sample, or several arguments as args=(...) and kwargs={...}"
        )
    where = [*accelerators(), CPU][0] if device is None else checked_device(device)
    first = scatter(arguments((*args,), dict(kwargs or {})), chunks)[0]
    rows = max(1, row_count(first.value))
    layers = measured(module, {rows: first}, where, timeout=timeout, progress=progress)
    return Profile(where, rows, layers)
