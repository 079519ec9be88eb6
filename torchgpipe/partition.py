"""Partitions: a sequential module is split, and each part is placed on its device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__: list[str] = []


def verify_module(module: nn.Module) -> None:
    """Checks that a module can be partitioned.

    Raises:
        TypeError: the module is not an :class:`nn.Sequential`.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be an nn.Sequential, since its layers are what is distributed over the "
            f"partitions (module: {type(module).__name__}); pass nn.Sequential(*layers) with "
            "the layers in the order in which forward calls them"
        )


def split_module(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> list[nn.Sequential]:
    """Splits a sequential module into partitions, and moves each to its device.

    A layer keeps its name, and the partition the training flag of the module. Tensors on the
    meta device are made on the partition's device, filled with NaN (integers with zero), so
    that weights that are never loaded cannot pass for loaded ones.

    Args:
        module: the layers.
        balance: how many layers each partition takes.
        devices: where each partition goes.

    Raises:
        ValueError: a parameter or buffer would be needed on two devices.
    """
    layers = iter(module._modules.items())
    partitions = []
    for size in balance:
        partition = nn.Sequential(OrderedDict(next(layers) for _ in range(size)))
        partition.training = module.training
        partitions.append(partition)

    verify_sharing(partitions, devices)
    for partition, device in zip(partitions, devices):
        materialize(partition, device)
        partition.to(device)
    return partitions


def verify_sharing(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Checks that no tensor is needed on two devices.

    Raises:
        ValueError: a parameter or buffer is shared by partitions on different devices.
    """
    owners: dict[Tensor, tuple[str, torch.device]] = {}
    for partition, device in zip(partitions, devices):
        for name, tensor in tensors(partition):
            other, other_device = owners.setdefault(tensor, (name, device))
            if other_device != device:
                raise ValueError(
                    "a parameter or buffer can be shared only by layers on one device "
                    f"({other}: {other_device}, {name}: {device}); choose a balance that keeps "
                    "these layers in one partition, or put their partitions on one device"
                )


def verify_placement(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Checks that all parameters and buffers are where their partition is.

    Raises:
        RuntimeError: one was moved.
    """
    for j, (partition, device) in enumerate(zip(partitions, devices)):
        for table in tables(partition):
            for tensor in table.values():
                if tensor is not None and tensor.device != device:
                    name = next(name for name, x in tensors(partition) if x is tensor)
                    raise RuntimeError(
                        "parameters and buffers must stay on the device of their partition "
                        f"(partition {j}: {device}, {name}: {tensor.device}); move the tensor "
                        "back, or wrap the module anew with other devices"
                    )


def materialize(partition: nn.Module, device: torch.device) -> None:
    """Gives memory on the device to the tensors that have none, keeping shared ones shared."""
    made: dict[Tensor, Tensor] = {}
    for table in tables(partition):
        for name, tensor in table.items():
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in made:
                value = torch.empty_like(tensor, device=device, requires_grad=False)
                value.fill_(torch.nan if value.is_floating_point() or value.is_complex() else 0)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, tensor.requires_grad)
                made[tensor] = value
            table[name] = made[tensor]


def tables(module: nn.Module) -> list[dict[str, Tensor | None]]:
    """The parameters and the buffers of each submodule, as it holds them."""
    found: list[dict[str, Tensor | None]] = []
    for submodule in module.modules():
        found += [submodule._parameters, submodule._buffers]  # type: ignore[list-item]
    return found


def tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers with their names; a shared one under each of its names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
