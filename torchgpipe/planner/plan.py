"""The ranking of a model: measured once, searched, and the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batchnorm import has_batch_norms
from torchgpipe.checks import checked_flag, verify_kind
from torchgpipe.devices.streams import Device
from torchgpipe.partition.arguments import Modes, checked_timeout, positive_int, verify_loss
from torchgpipe.partition.split import verify_module
from torchgpipe.planner.given import (
    Memory,
    chunks_of,
    leaves_of,
    limits_of,
    places_of,
    sizes_of,
    slowness_of,
    smaller_of,
    state_of,
    with_loss,
)
from torchgpipe.planner.layers import measured, measured_links
from torchgpipe.planner.room import Room
from torchgpipe.planner.rounds import verify_timed
from torchgpipe.planner.search import Problem, Trial, search
from torchgpipe.planner.ties import tied_apart, ties_of
from torchgpipe.skip.layout import verify_skippables
from torchgpipe.values.division import row_count
from torchgpipe.values.microbatch import scatter

__all__ = ["Ranking", "ranked", "too_large"]


@dataclass(frozen=True)
class Ranking:
    """The trials of a model, ranked.

    Args:
        problem: what was measured.
        places: the device of each worker.
        trials: those that fit before those that do not, the fastest first.
    """

    problem: Problem
    places: Sequence[torch.device]
    trials: Sequence[Trial]

    @property
    def best(self) -> Trial:
        """The fastest trial.

        Raises:
            ValueError: none fits.
        """
        best = self.trials[0]
        if best.excess:
            raise too_large(
                best.setting.name, best.schedule.chunks, [*best.balance], round(best.excess)
            )
        return best

    @cached_property
    def room(self) -> Room:
        """The memory of other settings, as far as it is known."""
        return Room(self.problem, self.places)

    def devices(self, trial: Trial) -> list[torch.device]:
        """The device of each partition."""
        return [self.places[w] for w in trial.schedule.placement]

    def memory(self, trial: Trial) -> dict[torch.device, int]:
        """The most bytes of each device; workers of one device add up."""
        found = dict.fromkeys(self.places[: len(trial.memory)], 0)
        for place, size in zip(self.places, trial.memory):
            found[place] += round(size)
        return found


def too_large(name: str | None, chunks: int, balance: list[int], excess: int) -> ValueError:
    """The error that nothing fits, with what comes nearest to it."""
    return ValueError(
        "a model must fit into the memory of its devices (nearest: "
        f"{name or 'GPipe'} with chunks={chunks} and balance={balance}, too much by {excess} "
        "bytes); use more devices, smaller mini-batches, or an optimizer with less state"
    )


def ranked(
    layers: nn.Sequential,
    input: Any,
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
    modes: Modes | None = None,
) -> Ranking:
    """Measure layers, search, and rank what was found.

    Args:
        layers: the model. It is not changed.
        input: the input of the first layer, as one value.

    Keyword Args:
        devices: as for :func:`torchgpipe.plan`, which passes on all but ``modes``.
        memory: likewise.
        optimizer: likewise.
        batch: likewise.
        loss: likewise.
        targets: likewise.
        chunks: likewise.
        timeout: likewise.
        progress: likewise.
        modes: the checkpoint modes, if they are not to be searched.

    Raises:
        TypeError: the layers could not be wrapped.
        ValueError: no layer takes any time, or an argument is out of range.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    verify_module(layers)
    verify_skippables(layers)
    if loss is not None:
        verify_loss(loss)
    rule, remedy = "targets must be the arguments of the loss", "pass such as targets=(target,)"
    verify_kind(targets, (list, tuple), rule, "targets", remedy)
    checked_timeout(timeout)
    progress = checked_flag(progress, "progress")
    places = places_of(devices)
    (whole,) = scatter(input, 1)
    have = max(1, row_count(input))
    rows = have if batch is None else positive_int(batch)
    if rows is None:
        raise ValueError(
            f"batch must be a positive number of rows (batch: {batch!r}); leave it out to plan for "
            "the rows of the sample"
        )
    # On one device, as on the CPU, all are together.
    behind = [loss] if isinstance(loss, nn.Module) else []
    ties = ties_of([*layers, *behind]) if len({*places}) > 1 else []
    tried = chunks_of(chunks, rows, has_norms=has_batch_norms(layers))
    # What is wrong is better told before anything is measured.
    limits_of(memory, places)
    state = state_of(optimizer)
    module, sizes = with_loss(layers, loss, targets), sizes_of(input, have, rows)
    others = smaller_of(input, have, rows)
    least = dict([[*sizes.items()][-1]])
    found, memory_of = measured(
        module, sizes, others, places[0], timeout=timeout, progress=progress
    )
    if loss is not None:
        # The targets are counted by themselves.
        own = [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []
        weights = found[-1].weights._replace(all=sum(x.nbytes for x in own))
        found[-1] = replace(found[-1], weights=weights)
    verify_timed(
        [x.time(rows) for x in found],
        places[0],
        "layers",
        f"on the CPU, by devices=['cpu'] * {len(places)}",
    )

    def time_on(place: torch.device) -> float:
        return sum(x.time(rows) for x in measured(module, sizes, least, place, timeout=0)[0])

    scale = rows / have
    problem = Problem(
        found,
        memory_of,
        loss is not None,
        rows,
        limits_of(memory, places, has_skips=memory_of.has_skips),
        slowness_of(places, time_on),
        {
            (places.index(a), places.index(b)): line
            for (a, b), line in measured_links(places).items()
        },
        state,
        scale * sum(x.nbytes for x in whole),
        scale * sum(x.nbytes for x in leaves_of(targets)[0] if isinstance(x, Tensor)),
        modes,
        ties,
    )
    trials = search(problem, tried)
    if not trials:
        raise tied_apart(ties, loss is not None)
    return Ranking(problem, places, trials)
