"""Layers that FSDP2 has sharded (``torch.distributed.fsdp.fully_shard``).

FSDP2 replaces the parameters of such layers: between steps each is a shard, and while layers run it
is whole. So no other code may restore an earlier parameter.

Nothing here imports torch.distributed.fsdp. A program without sharded layers does not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__: list[str] = []


def is_sharded(module: nn.Module) -> bool:
    """Whether a module is one to which fully_shard was applied."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


def exchanged(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """The modules whose parameters FSDP2 replaces.

    Args:
        modules: all modules of a partition.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    return {below for module in modules if is_sharded(module) for below in module.modules()}


def is_shard(parameter: object) -> bool:
    """Whether a parameter is a shard, the form in which the optimizer sees it."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return isinstance(parameter, getattr(tensors, "DTensor", ()))


def verify_sharding(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Check that sharded layers are on a single device: FSDP2 has one in each process.

    FSDP2 would move the parameters of all partitions there. And the end of backward would not wait
    for the gradients that FSDP2 sums up on other devices.

    Raises:
        ValueError: there are sharded layers and several devices.
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
