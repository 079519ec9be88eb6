"""The choice of a balance: the user's own, or the word ``"auto"``, which measures the layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe.devices.streams import Device
from torchgpipe.partition.arguments import MISSING, checked_chunks, checked_modes
from torchgpipe.partition.keeping import checked_keepings, verify_words
from torchgpipe.partition.sample import input_of
from torchgpipe.planner.given import places_of
from torchgpipe.planner.plan import ranked
from torchgpipe.planner.room import Room
from torchgpipe.values.division import row_count

__all__: list[str] = []


class Chosen(NamedTuple):
    """The settings of a wrapper, and what a step of it is expected to take, if they are planned.

    Args:
        balance: the balance.
        devices: the devices.
        chunks: the number of micro-batches.
        checkpoint: the checkpoint modes.
        time: milliseconds of a step; None if nothing was planned.
        memory: the most bytes of each device, likewise.
        room: what is known of the memory of other settings, likewise.
    """

    balance: Iterable[int] | None
    devices: Iterable[Device] | None
    chunks: Any
    checkpoint: Any
    time: float | None = None
    memory: dict[torch.device, int] | None = None
    room: Room | None = None


def chosen(
    module: nn.Sequential,
    balance: Iterable[int] | str | None,
    sample: Any,
    devices: Iterable[Device] | None,
    chunks: int,
    checkpoint: str | Sequence[str],
) -> Chosen:
    """Choose what ``"auto"`` leaves open, and leave the rest to the user.

    Args:
        module: the layers.
        balance: the balance, or ``"auto"``.
        sample: the arguments of a call, for ``"auto"``.
        devices: the devices.
        chunks: the number of micro-batches, or :data:`MISSING`.
        checkpoint: the checkpoint modes, or :data:`MISSING`.

    Raises:
        TypeError: ``"auto"`` has no sample, or one of the wrong kind.
        ValueError: the word is another one, a sample is given beside a balance, the layers take no
            time, or do not fit.
    """
    if not isinstance(balance, str):
        if sample is not None:
            raise ValueError(
                "a sample is for a balance that is measured (balance: "
                f"{type(balance).__name__}, given: sample); leave it out, or pass 'auto' as the "
                "balance"
            )
        return Chosen(
            balance,
            devices,
            1 if chunks is MISSING else chunks,
            "except_last" if checkpoint is MISSING else checkpoint,
        )
    if balance != "auto":
        raise ValueError(
            "balance is a list with the number of layers of each partition, or the word 'auto' "
            f"(balance: {balance!r}); pass 'auto' and a sample, or such as [2, 2]"
        )
    if sample is None:
        raise TypeError(
            "the balance 'auto' needs a sample to measure the layers with (sample: None); pass the "
            "arguments of a call with as many rows as a mini-batch"
        )
    input = input_of(sample)
    places = places_of(devices)
    # What is wrong is better told before anything is measured.
    own = None if chunks is MISSING else checked_chunks(chunks)
    count = min(len(places), len(module))
    if checkpoint is not MISSING:
        verify_words(
            checked_keepings(checkpoint, count),
            "a plan",
            "leave checkpoint out, or pass 'never', and assign model.checkpoint when the model is "
            "wrapped; torchgpipe.schedule.simulate tells what a step with 'offload' takes",
        )
    modes = None if checkpoint is MISSING else checked_modes(checkpoint, count)
    ranking = ranked(
        module,
        input,
        devices=places,
        chunks=None if own is None else [min(own, max(1, row_count(input)))],
        modes=modes,
    )
    best = ranking.best
    return Chosen(
        [*best.balance],
        ranking.devices(best),
        best.schedule.chunks if own is None else own,
        best.checkpoint if modes is None else modes,
        best.time,
        ranking.memory(best),
        ranking.room,
    )
