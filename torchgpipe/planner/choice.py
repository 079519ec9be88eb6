"""The choice for a wrapper: what "auto" leaves open, and whether other settings of it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batchnorm import has_batch_norms
from torchgpipe.checks import checked_flag, verify, verify_kind
from torchgpipe.devices.recorder import model_of
from torchgpipe.devices.streams import CPU, Device
from torchgpipe.partition.arguments import (
    MISSING,
    checked_chunks,
    checked_timeout,
    positive_int,
    verify_loss,
)
from torchgpipe.partition.keeping import Keeping, checked_keepings, is_policy, keepings_of
from torchgpipe.planner.given import (
    chunks_of,
    input_of,
    leaves_of,
    limits_of,
    looks_of,
    places_of,
    state_of,
    with_loss,
)
from torchgpipe.planner.layers import measured, measured_links
from torchgpipe.planner.memory import Computation
from torchgpipe.planner.sandbox import verify_timed
from torchgpipe.planner.search import Search, search
from torchgpipe.planner.trial import HOST, Problem, Trial
from torchgpipe.schedule.program import operations
from torchgpipe.schedule.simulator import Step
from torchgpipe.values.division import row_count
from torchgpipe.values.microbatch import scatter

__all__: list[str] = []


#: Devices whose times differ by less than this share are taken to be alike.
ALIKE = 0.05


def problem_of(
    layers: nn.Sequential,
    input: Any,
    places: Sequence[torch.device],
    rows: int,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    timeout: float = 1.0,
    progress: bool = False,
) -> Problem:
    """Measure layers, and copies between devices.

    The arguments are those of :func:`torchgpipe.plan`, but for the input, which is one value. The
    memory is what there is, and the optimizer AdamW.
    """
    if loss is not None:
        verify_loss(loss)
    rule, remedy = "targets must be the arguments of the loss", "pass such as targets=(target,)"
    verify_kind(targets, (list, tuple), rule, "targets", remedy)
    checked_timeout(timeout)
    progress = checked_flag(progress, "progress")
    have = max(1, row_count(input))
    after = [loss] if isinstance(loss, nn.Module) else []
    # On one device, as on the CPU, all are together.
    ties = _ties([*layers, *after]) if len({*places}) > 1 else []
    module, looks, few = with_loss(layers, loss, targets), *looks_of(input, have, rows)
    found, sizes = measured(module, few, looks, places[0], timeout=timeout, progress=progress)
    if loss is not None:
        # The targets are counted by themselves.
        own = [x for own in after for x in chain(own.parameters(), own.buffers())]
        weights = found[-1].weights._replace(all=sum(x.nbytes for x in own))
        found[-1] = replace(found[-1], weights=weights)
    elsewhere = f"on the CPU, by devices=['cpu'] * {len(places)}"
    verify_timed([x.time(rows) for x in found], places[0], "layers", elsewhere)
    least = dict([[*few.items()][-1]])

    def time_on(place: torch.device) -> float:
        return sum(x.time(rows) for x in measured(module, least, least, place, timeout=0)[0])

    number = {CPU: HOST} | {place: w for w, place in reversed([*enumerate(places)])}
    links = measured_links(places).items()
    (whole,) = scatter(input, 1)
    scale = rows / have
    problem = Problem(
        found,
        sizes,
        loss is not None,
        rows,
        places,
        [],
        slowness_of(places, time_on),
        {(number[a], number[b]): line for (a, b), line in links},
        state_of(torch.optim.AdamW),
        scale * sum(x.nbytes for x in whole),
        scale * sum(x.nbytes for x in leaves_of(targets)[0] if isinstance(x, Tensor)),
        ties=ties,
    )
    return replace(problem, memory=limits_of(None, places, problem.share))


def rows_of(batch: int | None, input: Any) -> int:
    """The rows of a mini-batch: those of the sample, if they are not given."""
    rows = max(1, row_count(input)) if batch is None else positive_int(batch)
    if rows is None:
        raise ValueError(
            f"batch must be a positive number of rows (batch: {batch!r}); leave it out to plan for "
            "the rows of the sample"
        )
    return rows


def slowness_of(
    places: Sequence[torch.device], measure: Callable[[torch.device], float]
) -> list[float]:
    """By which factor each device is slower than the first; one of each model is measured."""
    models = {model_of(place): place for place in reversed(places)}
    if len(models) == 1:
        return [1.0] * len(places)
    times = {model: measure(place) for model, place in models.items()}
    factors = [times[model_of(x)] / times[model_of(places[0])] for x in places]
    return [1.0 if abs(x - 1) < ALIKE else x for x in factors]


def _ties(layers: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """The pairs of layers that share a parameter or a buffer, by their numbers."""
    first: dict[Tensor, int] = {}
    tensors = ((k, x) for k, y in enumerate(layers) for x in chain(y.parameters(), y.buffers()))
    return sorted({(first[x], k) for k, x in tensors if first.setdefault(x, k) != k})


def too_large(name: str | None, chunks: int, balance: Sequence[int], excess: float) -> ValueError:
    """The error that nothing fits, with what comes nearest to it."""
    return ValueError(
        "a model must fit into the memory of its devices (nearest: "
        f"{name or 'GPipe'} with chunks={chunks} and balance={[*balance]}, too much by "
        f"{round(excess)} bytes); use more devices, smaller mini-batches, or an optimizer with "
        "less state"
    )


def chosen(
    module: nn.Sequential,
    balance: Iterable[int] | str | None,
    sample: Any,
    devices: Iterable[Device] | None,
    chunks: int,
    checkpoint: Any,
) -> tuple[Any, Any, Any, Any, Trial | None]:
    """Choose what ``"auto"`` leaves open, and leave the rest to the user.

    Returns:
        The balance, devices, chunks and checkpoint modes, and the trial that has them, if they are
        planned.

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
        chunks = 1 if chunks is MISSING else chunks
        checkpoint = "except_last" if checkpoint is MISSING else checkpoint
        return balance, devices, chunks, checkpoint, None
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
    input, places = input_of(sample), places_of(devices)
    # What is wrong is better told before anything is measured.
    own = None if chunks is MISSING else checked_chunks(chunks)
    count = min(len(places), len(module))
    modes = None if checkpoint is MISSING else checked_keepings(checkpoint, count)
    verify(
        modes is None or not any(map(is_policy, keepings_of(modes, count))),
        "a plan knows what cells keep whole, and nothing of what a policy chooses",
        "checkpoint",
        "selective",
        "pass 'always', whose balance serves as well, or leave checkpoint out, and assign "
        "model.checkpoint when the model is wrapped",
    )
    rows = rows_of(None, input)
    tried = chunks_of(
        None if own is None else [min(own, rows)], rows, has_norms=has_batch_norms(module)
    )
    best = search(replace(problem_of(module, input, places, rows), modes=modes), tried)[0]
    if best.excess:
        raise too_large(best.setting.name, best.schedule.chunks, best.balance, best.excess)
    chunks = best.schedule.chunks if own is None else own
    return [*best.balance], best.devices, chunks, modes or best.checkpoint, best


@lru_cache(8)
def _search_of(problem: Problem, rows: int) -> Search:
    share = rows / problem.batch
    given, targets = share * problem.given, share * problem.targets
    return Search(replace(problem, batch=rows, given=given, targets=targets))


def placed(
    order: Sequence[Step], devices: Sequence[torch.device]
) -> tuple[list[Computation], list[int], list[torch.device]]:
    """The computations of partitions on devices, the number of each device, and the devices."""
    places = [*dict.fromkeys(devices)]
    placement = [places.index(device) for device in devices]
    found = [(placement[op.stage], *op) for _, x, _ in order for op in operations(x)]
    return found, placement, places


def excess_of(
    problem: Problem | None,
    order: Sequence[Step],
    balance: Sequence[int],
    devices: Sequence[torch.device],
    rows: int,
    modes: Sequence[Keeping],
    *,
    has_loss: bool,
) -> float | None:
    """By how many bytes the fullest device has too little for a step of a model that was planned.

    It is 0 if all fit, and None if the plan was for something else, so nobody knows.
    """
    if problem is None or has_loss != problem.has_loss or not rows:
        return None
    limits = dict(zip(problem.places, problem.memory))
    if sum(balance) != problem.count or not limits.keys() >= {*devices}:
        return None
    computations, placement, places = placed(order, devices)
    memory = _search_of(problem, rows).peaks(computations, placement, balance, modes)
    return max(0.0, *(x - limits[place] for x, place in zip(memory, places)))
