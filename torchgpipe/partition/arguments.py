"""The balance and the devices of a wrapper, checked before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
from torch import nn

from torchgpipe.devices.streams import Device, accelerators, canonical_device

__all__: list[str] = []


def is_positive_int(value: object) -> bool:
    """Whether a value is a positive number of things, which True is not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def checked_balance(balance: Iterable[int], module: nn.Sequential) -> list[int]:
    """Check a balance, and return it as a list.

    Raises:
        TypeError: the balance is no sequence.
        ValueError: the balance has something else than positive integers, or does not add up to the
            number of layers.
    """
    if not isinstance(balance, Iterable):
        raise TypeError(
            "balance must be a sequence with the number of layers of each partition "
            f"(balance: {balance!r}); for one partition, pass [{len(module)}]"
        )
    sizes = list(balance)
    if not all(is_positive_int(size) for size in sizes):
        raise ValueError(
            "balance must be positive integers, the number of layers in each partition "
            f"(balance: {sizes}); leave a partition without layers out"
        )
    if sum(sizes) != len(module):
        raise ValueError(
            "balance must add up to the number of layers "
            f"(balance: {sizes}, sum: {sum(sizes)}, layers: {len(module)}); "
            "give every layer to one partition"
        )
    return [int(size) for size in sizes]


def checked_devices(devices: Iterable[Device] | None, partitions: int) -> list[torch.device]:
    """Check devices, and return one for each partition.

    Args:
        devices: the devices; by default all accelerators, or else the CPU for each partition.
        partitions: how many partitions there are.

    Raises:
        TypeError: the devices are no sequence.
        ValueError: this machine has no such device.
        IndexError: there are fewer devices than partitions.
    """
    found: Sequence[Device]
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
        raise TypeError(
            "devices must be a sequence with a device for each partition "
            f"(devices: {devices!r}); for one device for all, pass [{str(devices)!r}] * "
            f"{partitions}"
        )
    if devices is not None:
        found = list(devices)
    else:
        found = accelerators() or [torch.device("cpu")] * partitions
    if len(found) < partitions:
        raise IndexError(
            "there must be a device for each partition "
            f"(partitions: {partitions}, devices: {[str(device) for device in found]}); "
            "use fewer partitions, or name a device several times"
        )
    chosen = [canonical_device(device) for device in found[:partitions]]
    known = [torch.device("cpu"), *accelerators()]
    for device in chosen:
        if device not in known and device.type != "meta":
            raise ValueError(
                "devices must be the CPU or accelerators of this machine "
                f"(device: {device}, there are: {', '.join(map(str, known))}); name one that is "
                "there, several times if need be"
            )
    return chosen
