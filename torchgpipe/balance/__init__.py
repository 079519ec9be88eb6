"""Balancing: how many layers each partition should take, by the time or memory of each layer.

::

    balance = balance_by_time(len(devices), module, sample)
    model = GPipe(module, balance, devices=devices, chunks=8)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from torchgpipe.balance import blockpartition
from torchgpipe.balance.profile import profile_layers
from torchgpipe.devices.streams import Device
from torchgpipe.partition.split import verify_module

__all__ = ["balance_by_time", "balance_by_size"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    progress: bool = False,
) -> list[int]:
    """Balance by the time that each layer takes for forward and backward.

    The slowest partition sets the pace of a pipeline. With this balance the slowest partition is as
    fast as it can be. All layers are measured on one device, so the devices should be alike.

    Args:
        partitions: how many partitions to make.
        module: the layers.
        sample: an input of the size of a micro-batch, on any device: what the first layer takes as
            its one argument.

    Keyword Args:
        timeout: how many seconds to measure. A warm-up comes on top, and each layer is measured
            once at least.
        device: where to measure: by default the first accelerator, or the CPU if there is none.
        progress: whether to show a progress bar.

    Returns:
        How many layers each partition takes, for ``GPipe(module, balance)``.

    Raises:
        TypeError: the module could not be wrapped.
        ValueError: there are fewer layers than partitions.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    _verify(partitions, module)
    found = profile_layers(module, sample, timeout=timeout, device=device, progress=progress)
    return _balance([layer.forward + layer.backward for layer in found.layers], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    progress: bool = False,
) -> list[int]:
    """Balance by the memory that each layer takes in training.

    The cost of a layer is the memory of its parameters times ``param_scale``, plus the memory that
    it keeps of one micro-batch for backward, the output included.

    Args:
        partitions: how many partitions to make.
        module: the layers.
        input: an input of the size of a mini-batch, on any device: what the first layer takes as
            its one argument.

    Keyword Args:
        chunks: how many micro-batches are made of the mini-batch.
        param_scale: how many times the memory of a parameter it takes to train it, itself and its
            gradient included: 2 for SGD, 3 with momentum, 4 for Adam.
        device: where to measure: by default the first accelerator, or the CPU if there is none.
        progress: whether to show a progress bar.

    Returns:
        How many layers each partition takes, for ``GPipe(module, balance)``.

    Raises:
        TypeError: the module could not be wrapped.
        ValueError: there are fewer layers than partitions.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    _verify(partitions, module)
    if not param_scale >= 0:
        raise ValueError(
            "param_scale must not be negative, since it is how many times its own memory a "
            f"parameter takes in training (param_scale: {param_scale}); 2 is for SGD, 4 for Adam"
        )
    found = profile_layers(
        module, input, chunks=chunks, timeout=0, device=device, progress=progress
    )
    return _balance(
        [layer.activations + layer.parameters * param_scale for layer in found.layers], partitions
    )


def _verify(partitions: int, module: nn.Sequential) -> None:
    # Before any time is spent on measuring.
    verify_module(module)
    _balance([0.0] * len(module), partitions)


def _balance(costs: list[float], partitions: int) -> list[int]:
    return [len(block) for block in blockpartition.solve(costs, partitions)]
