"""The problem of a plan: layers as they were measured, and the devices to plan them for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.checks import checked_flag, verify_kind
from torchgpipe.devices.recorder import model_of
from torchgpipe.devices.streams import CPU
from torchgpipe.partition.arguments import checked_timeout, positive_int, verify_loss
from torchgpipe.partition.keeping import Keeping
from torchgpipe.planner.given import (
    FILLED,
    FILLED_WITH_SKIPS,
    leaves_of,
    limits_of,
    looks_of,
    state_of,
    with_loss,
)
from torchgpipe.planner.layers import LayerCosts, Line, measured, measured_links
from torchgpipe.planner.record import Sizes
from torchgpipe.planner.sandbox import verify_timed
from torchgpipe.values.division import row_count
from torchgpipe.values.microbatch import scatter

__all__: list[str] = []

#: Devices whose times differ by less than this share are taken to be alike.
ALIKE = 0.05

#: The number of the host among workers, in the table of links.
HOST = -1


@dataclass(frozen=True, eq=False)
class Problem:
    """A model to plan, and the devices to plan it for.

    Args:
        layers: its layers; after them the loss, if the schedule has it inside.
        sizes: the memory that these take.
        has_loss: whether the last layer is the loss.
        batch: the rows of a mini-batch.
        places: the device of each worker.
        memory: the bytes that each worker may use.
        slowness: by which factor each worker is slower than the one that was measured.
        links: the time of a copy between each pair of workers, by the bytes, and between each of
            them and the host, if it has a memory of its own.
        state: memory of the optimizer, for each byte of a parameter that it changes.
        given: memory of the input of a mini-batch.
        targets: memory of the targets of a mini-batch.
        modes: the checkpoint modes, one for all partitions or one for each, if they are given; None
            to search them.
        ties: pairs of layers that share a weight, so they must be on one worker.
    """

    layers: Sequence[LayerCosts]
    sizes: Sizes
    has_loss: bool
    batch: int
    places: Sequence[torch.device]
    memory: Sequence[float]
    slowness: Sequence[float]
    links: dict[tuple[int, int], Line]
    state: float
    given: float
    targets: float
    modes: Keeping | tuple[Keeping, ...] | None = None
    ties: Sequence[tuple[int, int]] = ()

    @property
    def share(self) -> float:
        """The share of a limit that a plan fills. Without a loss, autograd runs backward."""
        return FILLED if self.has_loss or not self.sizes.has_skips else FILLED_WITH_SKIPS

    @property
    def count(self) -> int:
        """The number of layers, without the loss."""
        return len(self.layers) - self.has_loss


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
    """The rows of a mini-batch: those of the sample, if they are not given.

    Raises:
        ValueError: the number is not positive.
    """
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
