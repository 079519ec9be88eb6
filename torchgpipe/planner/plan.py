"""The plan of a model: measured once, searched, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import MISSING
from torchgpipe.balance.rounds import verify_timed
from torchgpipe.devices.streams import Device
from torchgpipe.partition.arguments import positive_int
from torchgpipe.partition.split import verify_module
from torchgpipe.planner.candidates import Candidate, Plans
from torchgpipe.planner.given import (
    chunks_of,
    limits_of,
    places_of,
    sizes_of,
    slowness_of,
    state_of,
    with_loss,
)
from torchgpipe.planner.layers import measured
from torchgpipe.planner.links import measured_links
from torchgpipe.planner.search import Problem, Trial, search
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.simulator import simulate
from torchgpipe.skip.layout import verify_skippables
from torchgpipe.values.microbatch import scatter
from torchgpipe.values.structure import arguments

__all__ = ["plan"]


def plan(
    layers: nn.Sequential,
    sample: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices: Iterable[Device] | None = None,
    memory: float | Sequence[float] | None = None,
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

    The layers are measured once, with micro-batches of two sizes. Everything else is simulated:
    times exactly, and memory in the order in which the host issues work. Not counted are what a
    library takes for itself, and skips on their way.

    Args:
        layers: the model. It is not changed.
        sample: the argument of the first layer, with as many rows as a mini-batch, or fewer.

    Keyword Args:
        args: the arguments of the first layer behind the sample, or all of them without a sample.
        kwargs: the keyword arguments of the first layer.
        devices: the devices, one for each worker; by default all accelerators. Slower ones among
            them get less to do.
        memory: the bytes that each device may use, or one number for all. By default nine tenths of
            what the device has, where it says so, and no limit for the CPU.
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
        TypeError: the layers could not be wrapped, or there is no input.
        ValueError: no layer takes any time, or an argument is out of range.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    verify_module(layers)
    verify_skippables(layers)
    given = args if sample is MISSING else (sample, *args)
    if not (given or kwargs):
        raise TypeError(
            "there must be an input of the first layer to measure with (sample: missing, args: (), "
            "kwargs: None); pass a sample, or several arguments as args=(...) and kwargs={...}"
        )
    places = places_of(devices)
    input = arguments((*given,), dict(kwargs or {}))
    (whole,) = scatter(input, 1)
    have = max((len(x) for x in whole if x.dim()), default=1)
    rows = have if batch is None else positive_int(batch)
    if rows is None:
        raise ValueError(
            f"batch must be a positive number of rows (batch: {batch!r}); leave it out to plan for "
            "the rows of the sample"
        )
    tried = chunks_of(chunks, rows)
    module, sizes = with_loss(layers, loss, targets), sizes_of(input, have, rows)
    found = measured(module, sizes, places[0], timeout=timeout, progress=progress)
    if loss is not None:
        # The targets are counted by themselves.
        own = [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []
        found[-1] = replace(found[-1], parameters=sum(x.nbytes for x in own))
    verify_timed([x.time(rows) for x in found], places[0], "layers")

    def time_on(place: torch.device) -> float:
        return sum(x.time(rows) for x in measured(module, sizes, place, timeout=0))

    scale = rows / have
    problem = Problem(
        found,
        loss is not None,
        rows,
        limits_of(memory, places),
        slowness_of(places, time_on),
        {
            (places.index(a), places.index(b)): line
            for (a, b), line in measured_links(places).items()
        },
        state_of(optimizer),
        scale * sum(x.nbytes for x in whole),
        scale * sum(x.nbytes for x in targets if isinstance(x, Tensor)),
    )
    ranked = [_candidate(x, problem, places, loss) for x in search(problem, tried)]
    fits = [x for x in ranked if not x.excess]
    return Plans(fits, [x for x in ranked if x.excess], found)


def _candidate(
    trial: Trial,
    problem: Problem,
    places: Sequence[torch.device],
    loss: Callable[..., Any] | None,
) -> Candidate:
    schedule, costs = trial.schedule, trial.costs
    report = simulate(schedule, costs)
    modes = set(trial.modes)
    return Candidate(
        [*trial.balance],
        [places[w] for w in schedule.placement],
        schedule.chunks,
        modes.pop() if len(modes) == 1 else [*trial.modes],
        trial.setting.name,
        trial.time,
        {places[w]: round(x) for w, x in enumerate(trial.memory)},
        round(trial.excess),
        report,
        bounds(schedule.placement, schedule.chunks, costs).gap(report),
        loss,
    )
