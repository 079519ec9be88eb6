"""The balance, the devices and the settings of a wrapper, checked before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchgpipe.checks import has_entries, verify, verify_function, verify_kind, verify_number
from torchgpipe.devices.streams import Device, accelerators, canonical_device

__all__: list[str] = []


class Missing:
    """A default that is no value, since None is one."""

    def __repr__(self) -> str:
        return "..."


#: Stands for an argument that is not given.
MISSING: Any = Missing()

#: The most seconds of a measurement.
DAY = 86_400


def positive_int(value: Any) -> int | None:
    """A positive number of things as an integer; None for anything else, such as True or 1.5.

    8 / 2 is such a number, and so is an element of a tensor or of an array.
    """
    try:
        number = int(value)
        return number if number > 0 and number == value and not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def checked_chunks(chunks: Any) -> int:
    """Check a number of micro-batches, and return it as an integer.

    Raises:
        ValueError: the number is no positive integer.
    """
    number = positive_int(chunks)
    if number is None:
        raise ValueError(
            "chunks must be a positive integer, the number of micro-batches "
            f"(chunks: {chunks!r}); chunks=1 does without micro-batches"
        )
    return number


def checked_threads(threads: Any) -> int:
    """Check a number of threads, and return it as an integer.

    Raises:
        ValueError: the number is no positive integer.
    """
    number = positive_int(threads)
    if number is None:
        raise ValueError(
            "threads must be a positive integer, the number of threads that compute micro-batches "
            f"(threads: {threads!r}); threads=1 computes all in the thread of the caller"
        )
    return number


def checked_timeout(timeout: Any) -> float:
    """Check the seconds of a measurement.

    Raises:
        TypeError: they are no number.
        ValueError: they are negative, or more than a day.
    """
    rule = "timeout must be the seconds to measure, from 0 to a day"
    remedy = "pass 1.0, or 0 for a few rounds alone"
    verify_number(timeout, rule, "timeout", remedy)
    verify(timeout <= DAY, rule, "timeout", timeout, remedy)
    seconds: float = timeout
    return seconds


def verify_scale(param_scale: Any) -> None:
    """Check how many times its own memory a parameter takes.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or not finite.
    """
    verify_number(
        param_scale,
        "param_scale must not be negative, since it is how many times its own memory a parameter "
        "takes in training",
        "param_scale",
        "2 is for SGD, 4 for Adam",
    )


def verify_a_module(module: Any, name: str) -> None:
    """Check that a value is a module.

    Raises:
        TypeError: it is none.
    """
    remedy = "pass the model itself, an object and not its class"
    verify_kind(module, nn.Module, f"{name} must be an nn.Module", name, remedy)


def verify_loss(loss: Any, remedy: str = "pass torch.nn.functional.cross_entropy, for one") -> None:
    """Check that a loss can be called.

    Raises:
        TypeError: it cannot.
        ValueError: it says of itself that it is a sum.
    """
    rule = "loss must be a function of an output and its targets"
    verify_function(loss, rule, "loss", remedy)
    given = loss.keywords if isinstance(loss, partial) else getattr(loss, "__dict__", {})
    verify(
        given.get("reduction") != "sum",
        "loss must be a mean over the rows of its micro-batch",
        "reduction",
        "sum",
        "take the mean, or have a function return (sum, number of what is summed up)",
    )


def checked_index(index: Any) -> Any:
    """Check the index of a layer, or of several.

    Raises:
        TypeError: it is none.
    """
    valid = isinstance(index, slice) or hasattr(index, "__index__")
    verify(valid, "a layer has a number", "index", index, "pass such as 0, or -1", TypeError)
    return index


def checked_balance(balance: Iterable[int] | None, module: nn.Sequential) -> list[int]:
    """Check a balance, and return it as a list.

    Raises:
        TypeError: the balance is no sequence.
        ValueError: the balance is missing, has something else than positive integers, or does not
            add up to the number of layers.
    """
    if balance is None:
        raise ValueError(
            "balance must be given, the number of layers of each partition (balance: None); for "
            f"one partition, pass [{len(module)}], and for several 'auto' and a sample, or ask "
            "torchgpipe.balance.balance_by_time"
        )
    try:
        given = list(balance)
    except TypeError:
        raise TypeError(
            "balance must be a sequence with the number of layers of each partition "
            f"(balance: {balance!r}); for one partition, pass [{len(module)}]"
        ) from None
    sizes = [size for size in map(positive_int, given) if size is not None]
    if len(sizes) < len(given):
        raise ValueError(
            "balance must be positive integers, the number of layers in each partition "
            f"(balance: {given}); leave a partition without layers out"
        )
    if sum(sizes) != len(module):
        raise ValueError(
            "balance must add up to the number of layers "
            f"(balance: {sizes}, sum: {sum(sizes)}, layers: {len(module)}); "
            "give every layer to one partition, or ask torchgpipe.balance.balance_by_time"
        )
    return sizes


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
    if devices is not None and (isinstance(devices, str) or not has_entries(devices)):
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
    return [checked_device(device) for device in found[:partitions]]


def checked_device(device: Device) -> torch.device:
    """Check that this machine has a device.

    Raises:
        ValueError: it has not.
    """
    known = [torch.device("cpu"), *accelerators()]
    try:
        chosen = canonical_device(device)
        there = chosen in known or chosen.type == "meta"
    except (RuntimeError, TypeError, ValueError, OverflowError):
        # PyTorch knows no such name, or there is no accelerator that an index could be of.
        there = False
    if not there:
        raise ValueError(
            "devices must be the CPU or accelerators of this machine "
            f"(device: {device}, there are: {', '.join(map(str, known))}); name one that is "
            "there, several times if need be"
        )
    return chosen
