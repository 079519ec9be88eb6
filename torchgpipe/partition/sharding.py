"""Layers that FSDP2 has sharded (``torch.distributed.fsdp.fully_shard``).

It exchanges their parameters: a shard between steps, the whole while layers run. Nobody else may
put them back to what they were.

Only who shards imports torch.distributed.fsdp; here it is looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__: list[str] = []


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 exchanges the parameters of a module, but for those of another one below it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


def exchanged(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Those whose parameters FSDP2 exchanges.

    Args:
        modules: all modules of a partition.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    return {below for module in modules if is_sharded(module) for below in module.modules()}


def is_shard(parameter: object) -> bool:
    """Whether it is a part of a parameter, or stands for one, as the optimizer sees it."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return isinstance(parameter, getattr(tensors, "DTensor", ()))


def verify_sharding(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Checks that what is sharded is on the one device that FSDP2 knows of a process.

    It would move the parameters of all partitions there, and at the end of backward nobody would
    wait for the gradients that it sums up on others.

    Raises:
        ValueError: partitions are on several devices.
    """
    if len({*devices}) < 2 or "torch.distributed.fsdp" not in sys.modules:
        return
    for name, layer in module.named_modules():
        if is_sharded(layer):
            raise ValueError(
                "layers that fully_shard has sharded must be on one device with all others, since "
                f"FSDP2 knows one device of each process (layer: {name or type(layer).__name__}, "
                f"devices: {[str(device) for device in devices]}); for data parallelism wrap the "
                "model in DistributedDataParallel instead, and do not shard it"
            )
