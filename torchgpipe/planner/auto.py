"""Choices that the balance ``"auto"`` of a wrapper leaves open, made by the search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchgpipe.batchnorm import has_batch_norms
from torchgpipe.checks import verify
from torchgpipe.devices.streams import Device
from torchgpipe.mapped.hugging_face import on_cpu
from torchgpipe.partition.arguments import MISSING, checked_chunks
from torchgpipe.partition.keeping import checked_keepings, counted, is_policy, keepings_of
from torchgpipe.planner.given import chunks_of, has_no_place, input_of, places_of, rows_of
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.proving import PROVEN, agreed, proof_of, ranked
from torchgpipe.planner.trial import Trial, by_device

__all__: list[str] = []


def too_large(
    name: str | None, chunks: int, balance: Sequence[int], excess: float, more: str = ""
) -> ValueError:
    """The error that nothing fits, with what comes nearest to it, and more that may be done."""
    return ValueError(
        "a model must fit into the memory of its devices (nearest: "
        f"{name or 'GPipe'} with chunks={chunks} and balance={[*balance]}, too much by "
        f"{round(excess)} bytes); {more}use more devices, smaller mini-batches, or an optimizer "
        "with less state"
    )


def chosen(
    module: nn.Sequential,
    balance: Iterable[int] | str | None,
    sample: Any,
    devices: Iterable[Device] | None,
    chunks: int,
    checkpoint: Any,
    wrap: Callable[..., nn.Module],
) -> tuple[Any, Any, Any, Any, tuple[float, dict[torch.device, int]] | None]:
    """Choose what ``"auto"`` leaves open, and leave the rest to the user.

    ``wrap`` makes the wrapper of layers, to be tried.

    Returns:
        The balance, devices, chunks and checkpoint modes, and the time and memory that are
        predicted, if they are planned.
    """
    if not isinstance(balance, str):
        if sample is not None:
            raise ValueError(
                "a sample is for a balance that is measured (balance: "
                f"{type(balance).__name__}, given: sample); leave it out, or pass 'auto' as the "
                "balance"
            )
        chunks = 1 if chunks is MISSING else chunks
        checkpoint = "except_last" if checkpoint is MISSING else checkpoint
        return balance, devices, chunks, checkpoint, None
    rule = "balance is a list with the number of layers of each partition, or the word 'auto'"
    remedy = "pass 'auto' and a sample, or such as [2, 2]"
    verify(balance == "auto", rule, "balance", balance, remedy)
    rule = "the balance 'auto' needs a sample to measure the layers with"
    remedy = "pass the arguments of a call with as many rows as a mini-batch"
    verify(sample is not None, rule, "sample", sample, remedy, TypeError)
    input = input_of(sample)
    places = places_of([*on_cpu(module).values()] if has_no_place(devices) else devices)
    # Wrong arguments are told before the layers are measured, which takes a second or more.
    fixed = None if chunks is MISSING else checked_chunks(chunks)
    count = min(len(places), len(module))
    modes = None if checkpoint is MISSING else checked_keepings(checkpoint, count)
    keepings = keepings_of(modes or "never", count)
    rows = rows_of(None, input)
    tried = chunks_of(fixed and min(fixed, rows), rows, has_norms=has_batch_norms(module))

    def wrapped(trial: Trial, layers: nn.Sequential, _: None) -> nn.Module:
        options = {"chunks": trial.schedule.chunks, "checkpoint": modes or trial.checkpoint}
        return wrap(layers, [*trial.balance], devices=trial.devices, **options)

    def choose() -> tuple[list[int], list[int], int, Any, float, list[float]]:
        fixed_modes = modes and tuple(map(counted, keepings))
        problem = Problem(module, input, places, rows, modes=fixed_modes)
        proven = partial(proof_of, wrapped, module, input, None, ())
        trial = ranked(problem, tried, PROVEN, proven)[0]
        workers, m = trial.setting.placement, trial.setting.chunks
        if trial.excess:
            # A policy counts as 'never'.
            remedy = "pass 'always', and assign the policy to model.checkpoint after that, "
            more = remedy if any(map(is_policy, keepings)) else ""
            raise too_large(trial.setting.name, m, trial.balance, trial.excess, more)
        return [*trial.balance], [*workers], m, trial.checkpoint, trial.time, trial.memory

    sizes, workers, m, chosen_modes, time, memory = agreed(choose)
    predicted = time, by_device(places, memory)
    return sizes, [places[w] for w in workers], fixed or m, modes or chosen_modes, predicted
