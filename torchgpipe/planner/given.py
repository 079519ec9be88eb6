"""Arguments of a plan: devices, memory, optimizer, rows and the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.checks import has_entries, is_number, listed, shown, verify, verify_number
from torchgpipe.devices.recorder import memory_total
from torchgpipe.devices.streams import CPU, Device, accelerators
from torchgpipe.partition.arguments import checked_device, checked_devices, positive_int
from torchgpipe.values.division import FlatInput, divided, row_count
from torchgpipe.values.marks import NoChunk
from torchgpipe.values.microbatch import Batch, scatter
from torchgpipe.values.structure import Arguments, arguments, flatten_tree

__all__: list[str] = []

#: Limits of memory, in bytes or such as ``"10GiB"``: one for all devices or for each, or by device.
Memory: TypeAlias = float | str | Sequence[float | str] | Mapping[Device, float | str]

#: The bytes of the units in texts.
UNITS = {f"{x}{i}B": (1024 if i else 1000) ** k for k, x in enumerate("KMGT", 1) for i in ("", "i")}

#: The share of a device's memory that a plan may use, if nobody says how much. The rest is for
#: fragments of memory, and for what libraries take and free within an operator, as cuDNN does: no
#: measurement of layers sees that.
USABLE = 0.9

#: The share of a limit that a predicted peak may fill. What was trained on the devices may fill the
#: whole limit.
FILLED = 0.85

#: The most micro-batches that are tried by default.
MOST = 64


def has_no_place(devices: Iterable[Device] | None) -> bool:
    """Whether no devices are given, and there are no accelerators."""
    return devices is None and not accelerators()


def places_of(devices: Iterable[Device] | None, *, are_one_each: bool = True) -> list[torch.device]:
    """The devices to plan for: by default all accelerators."""
    entries: Any = accelerators() if devices is None else devices
    if not isinstance(entries, str) and has_entries(entries):
        entries = [*entries]
    # If the devices are no sequence, the error proposes a list of one device.
    places = checked_devices(entries, len(entries) if isinstance(entries, list) else 1)
    is_twice = are_one_each and len({*places}) < len(places) and places[0] != CPU
    if not places or is_twice:
        raise ValueError(
            "'auto', and a plan, is for one or more accelerators, or other devices, of a plan each "
            f"of them once (devices: {[str(x) for x in entries]}); pass such as devices=[0, 1, 2, "
            "3], or ['cpu'] * 4"
        )
    return places


def chunks_of(
    chunks: int | Iterable[int] | None, rows: int, *, has_norms: bool = False
) -> list[int]:
    """The numbers of micro-batches to try, given or not, of a mini-batch of some rows."""
    if chunks is None and has_norms:
        warn(
            "batch normalisations see micro-batches, so their number is no matter of speed alone "
            "(chunks: not given); pass the number that you want to train with, or several of them"
        )
    if chunks is None:
        # A batch normalisation refuses a micro-batch of a single row, which has no variance.
        most = min(max(1, rows // 2) if has_norms else rows, MOST)
        return [2**k for k in range(MOST.bit_length()) if 2**k <= most]
    remedy = "leave them out to try 1, 2, 4 and so on"
    entries: Any = [chunks] if type(chunks) is int else chunks
    entries = listed(entries, "chunks must be numbers of micro-batches", "chunks", remedy)
    numbers = sorted({positive_int(x) or rows + 1 for x in entries})
    if not numbers or numbers[-1] > rows:
        raise ValueError(
            "chunks must be numbers of micro-batches, from 1 to the rows of a mini-batch (chunks: "
            f"{shown(entries)}, rows: {rows}); {remedy}"
        )
    return numbers


def looks_of(input: Any, have: int, rows: int) -> dict[int, Batch]:
    """Micro-batches of an input to measure with, by their rows: a quarter and an eighth.

    Of few rows they are larger, since a batch normalisation takes no single one.
    """
    counts = [max(1, have * share // rows) for share in (8, 4, 2, 1)]
    some = [x for x in counts if have >= 2 * x][:2] or [1]
    # ``divided`` tells the rows of the first micro-batch. Its tensors do not: some go whole.
    return {divided(have, count)[0]: scatter(input, count)[0] for count in reversed(some)}


def limits_of(memory: Memory | None, places: Sequence[torch.device]) -> list[float]:
    """The bytes that each device may use."""
    if memory is None:
        return [USABLE * memory_total(x) for x in places]
    sizes: Any = memory
    if isinstance(memory, Mapping):
        # Accelerate's tables also have devices that no layer goes to, such as the CPU: those limits
        # are left out.
        by_device = {checked_device(device): x for device, x in memory.items()}
        missing = [str(x) for x in dict.fromkeys(places) if x not in by_device]
        if missing:
            raise ValueError(
                "memory by device must have each device that is used "
                f"(memory: {shown(memory)}, missing: {', '.join(missing)}); add them, or pass "
                "those with a limit as devices"
            )
        sizes = [by_device[x] for x in places]
    elif isinstance(memory, str) or not isinstance(memory, Sequence):
        sizes = [memory] * len(places)
    limits = [*map(bytes_of, sizes)]
    if len(limits) != len(places) or not all(limits):
        raise ValueError(
            "memory must be the bytes that a device may use, or such as '10GiB', one for all, one "
            f"for each or a table by device (memory: {shown(memory)}, devices: {len(places)}); "
            "leave it out to use what there is"
        )
    return limits


def bytes_of(size: Any) -> float:
    """A positive number of bytes, or such as ``"10GiB"``, as a number; 0 for anything else."""
    if isinstance(size, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]i?B)", size.strip())
        size = float(parts[1]) * UNITS[parts[2]] if parts else 0
    return float(size) if is_number(size) and size > 0 else 0.0


def state_of(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | float) -> float:
    """The bytes of state that an optimizer has for each byte of a parameter, by one step of it."""
    rule = "optimizer must be a function that makes one of parameters, or a number from 0 on"
    remedy = "pass such as torch.optim.AdamW, or 0 bytes of state for SGD, 2 for Adam"
    if not callable(optimizer):
        verify_number(optimizer, rule, "optimizer", remedy)
        return float(optimizer)
    weight = nn.Parameter(torch.zeros(64, 64))
    made = optimizer([weight])
    verify(isinstance(made, torch.optim.Optimizer), rule, "made", made, remedy, TypeError)
    weight.grad = torch.zeros_like(weight)
    made.step()
    state = [x for x in made.state[weight].values() if isinstance(x, Tensor)]
    return sum(x.nbytes for x in state if x.dim()) / weight.nbytes


class Loss(nn.Module):
    """A loss as the last layer, whose targets are as many as the rows that come."""

    def __init__(self, loss: Callable[..., Any], targets: Sequence[Any]) -> None:
        super().__init__()
        self.loss = loss
        leaves, containers = flatten_tree((*targets,))
        # A function, since copies of this layer share it: the containers of targets may hold what
        # ``deepcopy`` refuses.
        self._together = lambda leaves: containers.unflatten(leaves)
        self._leaves = [x.value if isinstance(x, NoChunk) else x for x in leaves]
        #: Whether each of them is a tensor that is cut to the rows that come.
        self._is_cut = [isinstance(x, Tensor) and x.dim() > 0 for x in leaves]
        for k, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"target{k}", leaf)

    def forward(self, output: Any) -> Any:
        rows = len(next(iter(Batch(output))))
        leaves = [getattr(self, f"target{k}", leaf) for k, leaf in enumerate(self._leaves)]
        leaves = [leaf[:rows] if is_cut else leaf for leaf, is_cut in zip(leaves, self._is_cut)]
        loss = self.loss(output, *self._together(leaves))
        return loss[0] if isinstance(loss, tuple) else loss


def input_of(sample: Any) -> Any:
    """Return a sample as the input of a first layer, as a call of the model would make it."""
    if FlatInput(sample).given:
        raise ValueError(
            "a sample has rows, which are divided in several ways and measured, so it must not be "
            f"divided already (sample: {type(sample).__name__} with Chunks); pass a mini-batch "
            "that has rows"
        )
    return arguments(*arguments_of(sample))


def arguments_of(sample: Any) -> Arguments:
    """Return the arguments of a sample, whichever kind it is."""
    if isinstance(sample, Arguments):
        return sample
    if isinstance(sample, Mapping) and all(isinstance(name, str) for name in sample):
        return Arguments((), {**sample})
    if isinstance(sample, tuple | Tensor):
        return Arguments((sample,) if isinstance(sample, Tensor) else sample, {})
    raise TypeError(
        "a sample is a dict of keyword arguments, a tuple of arguments, or a tensor (sample: "
        f"{shown(sample)}); pass a single argument of another kind as (argument,)"
    )


def rows_of(batch: int | None, input: Any) -> int:
    """The rows of a mini-batch: those of the sample, if they are not given."""
    rows = max(1, row_count(input)) if batch is None else positive_int(batch) or 0
    rule = "batch must be a positive number of rows"
    verify(rows, rule, "batch", batch, "leave it out to plan for the rows of the sample")
    return rows
