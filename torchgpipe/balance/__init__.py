"""Balancing: how many layers each partition should take, by the time or memory of each layer.

::

    balance = balance_by_time(len(devices), module, sample)
    model = GPipe(module, balance, devices=devices, chunks=8)

For a model that is no ``nn.Sequential``, :func:`map_by_time` and :func:`map_by_size` propose a
device map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchgpipe.ambient.notes import add_note
from torchgpipe.balance import blockpartition
from torchgpipe.balance.device_map import map_by_size, map_by_time
from torchgpipe.balance.profile import profile_layers
from torchgpipe.devices.streams import Device
from torchgpipe.partition.arguments import MISSING, checked_timeout, positive_int, verify_scale
from torchgpipe.partition.split import verify_module
from torchgpipe.planner.cuts import evenest

__all__ = ["balance_by_time", "balance_by_size", "map_by_time", "map_by_size"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 1.0,
    device: Device | None = None,
    progress: bool = False,
) -> list[int]:
    """Balance by the time that each layer takes for forward and backward.

    The slowest partition sets the pace of a pipeline. With this balance the slowest partition is as
    fast as it can be, give or take the noise of the measurement. Among such balances it is the
    evenest one. All layers are measured on one device, so the devices should be alike, and in train
    mode, whatever the mode of the module.

    Args:
        partitions: how many partitions to make.
        module: the layers.
        sample: an input of the size of a micro-batch, on any device: the argument of the first
            layer.

    Keyword Args:
        args: the arguments of the first layer behind the sample, or all of them without a sample.
        kwargs: the keyword arguments of the first layer.
        timeout: how many seconds to measure. A warm-up comes on top, and there are three rounds
            over all layers at least.
        device: where to measure: by default the first accelerator, or the CPU if there is none.
        progress: whether to show a progress bar.

    Returns:
        How many layers each partition takes, for ``GPipe(module, balance)``.

    Raises:
        TypeError: the module could not be wrapped, or there is no input.
        ValueError: there are fewer layers than partitions, or no layer takes any time.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    partitions = _verified(partitions, module)
    checked_timeout(timeout)
    found = profile_layers(
        module,
        sample,
        args=args,
        kwargs=kwargs,
        timeout=timeout,
        device=device,
        progress=progress,
    )
    times, spreads = found.times()
    return evenest(times, partitions, spreads)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    progress: bool = False,
) -> list[int]:
    """Balance by the memory that each layer takes in training.

    The cost of a layer is the memory of its parameters times ``param_scale``, plus the memory that
    it keeps of one micro-batch for backward, the output included. Layers are measured in train
    mode, whatever the mode of the module.

    Args:
        partitions: how many partitions to make.
        module: the layers.
        input: an input of the size of a mini-batch, on any device: the argument of the first layer.

    Keyword Args:
        args: the arguments of the first layer behind the input, or all of them without one.
        kwargs: the keyword arguments of the first layer.
        chunks: how many micro-batches are made of the mini-batch. Layers run one of them; with the
            default they run the whole mini-batch, for which a device may lack the memory.
        param_scale: how many times the memory of a parameter it takes to train it, itself and its
            gradient included: 2 for SGD, 3 with momentum, 4 for Adam.
        device: where to measure: by default the first accelerator, or the CPU if there is none.
        progress: whether to show a progress bar.

    Returns:
        How many layers each partition takes, for ``GPipe(module, balance)``.

    Raises:
        TypeError: the module could not be wrapped, or there is no input.
        ValueError: there are fewer layers than partitions.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    partitions = _verified(partitions, module)
    verify_scale(param_scale)
    try:
        found = profile_layers(
            module,
            input,
            args=args,
            kwargs=kwargs,
            chunks=chunks,
            timeout=None,
            device=device,
            progress=progress,
        )
    except RuntimeError as error:
        # On the CPU there is no class of its own for it.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            rows = "the whole mini-batch" if chunks == 1 else "one micro-batch"
            add_note(
                error,
                f"balance_by_size ran {rows} through each layer (chunks: {chunks}); pass the "
                "chunks that you will train with, or more of them",
            )
        raise
    return _balance(
        [layer.activations + layer.parameters * param_scale for layer in found.layers], partitions
    )


def _verified(partitions: Any, module: nn.Sequential) -> int:
    """The number of partitions as an integer, before any time is spent on measuring."""
    verify_module(module)
    number = positive_int(partitions)
    if number is None:
        raise ValueError(
            "partitions must be a positive integer "
            f"(partitions: {partitions!r}); one partition takes all layers"
        )
    _balance([0.0] * len(module), number)
    return number


def _balance(costs: list[float], partitions: int) -> list[int]:
    return [len(block) for block in blockpartition.solve(costs, partitions)]
