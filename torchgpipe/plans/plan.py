"""The plan of a model: the ranking of the planner as candidates, which wrap a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.streams import Device
from torchgpipe.partition.sample import input_of
from torchgpipe.planner.given import Memory
from torchgpipe.planner.plan import Ranking, ranked
from torchgpipe.planner.search import Trial
from torchgpipe.plans.candidates import Candidate, Plans
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.simulator import simulate

__all__ = ["plan"]


def plan(
    layers: nn.Sequential,
    sample: Any,
    *,
    devices: Iterable[Device] | None = None,
    memory: Memory | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | float = torch.optim.AdamW,
    batch: int | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    chunks: Iterable[int] | None = None,
    timeout: float = 1.0,
    progress: bool = False,
) -> Plans:
    """Find the balance, chunks, checkpoints and schedule that are fastest, and fit into memory.

    ::

        plans = torchgpipe.plan(layers, input, loss=F.cross_entropy, targets=(target,))
        print(plans)
        training = plans.best.wrap(layers)

    The layers are measured once, with micro-batches of a few sizes. Everything else is simulated:
    times exactly, and memory in the order in which the host issues work. Skips count where they
    wait, and their copies take time. Not counted is what a library takes for itself, nor targets
    that are not given.

    Args:
        layers: the model. It is not changed.
        sample: the arguments of the first layer, with as many rows as a mini-batch, or fewer: a
            tensor, a tuple of arguments, a dict of keyword arguments, or what
            :func:`torchgpipe.arguments` returns.

    Keyword Args:
        devices: the devices, one for each worker; by default all accelerators. Slower ones among
            them get less to do.
        memory: the bytes that each device may use, one number for all, or a table by device, as
            ``{0: "10GiB", 1: "8GiB"}``. A plan leaves 2 % of them free, and 5 % for layers with
            skips, since predictions may be as much too low. By default a plan fills nine tenths of
            what the device has, where it says so, and there is no limit for the CPU.
        optimizer: the optimizer, as a function of parameters, or how many bytes of state it has for
            each byte of a parameter: 0 for SGD, 1 with momentum, 2 for Adam.
        batch: the rows of a mini-batch; by default those of the sample.
        loss: the loss of a micro-batch, as for :class:`~torchgpipe.ScheduledLoss`. Without it only
            the order of :class:`~torchgpipe.GPipe` is planned, whose loss is outside.
        targets: the arguments of the loss behind the output, with the rows of the sample.
        chunks: the numbers of micro-batches to try; by default 1, 2, 4 and so on, up to the rows.
        timeout: the seconds to measure. A warm-up comes on top.
        progress: whether to show a progress bar.

    Returns:
        The candidates: for each schedule and number of micro-batches the best one found.

    Raises:
        TypeError: the layers could not be wrapped, or the sample is of another kind.
        ValueError: no layer takes any time, an argument is out of range, or layers share weights
            that no plan keeps on one device.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    found = ranked(
        layers,
        input_of(sample),
        devices=devices,
        memory=memory,
        optimizer=optimizer,
        batch=batch,
        loss=loss,
        targets=targets,
        chunks=chunks,
        timeout=timeout,
        progress=progress,
    )
    candidates = [_candidate(x, found, loss) for x in found.trials]
    return Plans(
        [x for x in candidates if not x.excess],
        [x for x in candidates if x.excess],
        [*found.problem.layers],
        _limits(found),
    )


def _limits(ranking: Ranking) -> dict[torch.device, int]:
    """The bytes that a plan may fill each device with; workers of one device add up."""
    found: dict[torch.device, int] = {}
    for place, size in zip(ranking.places, ranking.problem.memory):
        if size < inf:
            found[place] = found.get(place, 0) + round(size)
    return found


def _candidate(trial: Trial, ranking: Ranking, loss: Callable[..., Any] | None) -> Candidate:
    schedule, costs = trial.schedule, trial.costs
    report = simulate(schedule, costs)
    return Candidate(
        [*trial.balance],
        ranking.devices(trial),
        schedule.chunks,
        trial.checkpoint,
        trial.setting.name,
        trial.time,
        ranking.memory(trial),
        round(trial.excess),
        report,
        bounds(schedule.placement, schedule.chunks, costs, skips=schedule.skips).gap(report),
        loss,
        ranking.room,
    )
