"""A problem to search: a model whose layers are measured, and the devices to plan it for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.checks import checked_flag, verify_kind
from torchgpipe.partition.arguments import checked_timeout, verify_loss
from torchgpipe.planner.given import (
    limits_of,
    looks_of,
    state_of,
    targets_in,
    with_loss,
)
from torchgpipe.planner.layers import Layer, Line, measured, measured_links
from torchgpipe.planner.memory import Stage
from torchgpipe.planner.sandbox import Figures, verify_timed
from torchgpipe.values.division import row_count
from torchgpipe.values.microbatch import scatter

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Problem:
    """A model to plan, and the devices to plan it for."""

    layers: Sequence[Layer]
    #: Whether the last layer is the loss.
    has_loss: bool
    batch: int
    places: Sequence[torch.device]
    #: The bytes that each worker may use.
    memory: Sequence[float]
    #: The time of a copy between each pair of workers, by the bytes.
    links: dict[tuple[int, int], Line]
    #: Memory of the optimizer, for each byte of a parameter that it changes.
    state: float
    #: Memory of the input of a mini-batch.
    input_bytes: float
    #: Memory of the targets of a mini-batch.
    target_bytes: float
    #: The checkpoint mode of each partition, if they are given; None to search them.
    modes: tuple[str, ...] | None = None
    #: Pairs of layers that share a weight, so they must be on one worker.
    ties: Sequence[tuple[int, int]] = ()
    #: Caches of :meth:`stage`: partitions by their layers and rows, and figures by rows.
    _stages: dict[tuple[int, int, int], Stage] = field(default_factory=dict, repr=False)
    _figures: dict[int, list[Figures]] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """The number of layers, without the loss."""
        return len(self.layers) - self.has_loss

    def rows(self, m: int) -> int:
        """The rows of the largest of some micro-batches."""
        return -(-self.batch // m)

    def stage(self, start: int, stop: int, m: int) -> Stage:
        """Some layers as a partition, of one of some micro-batches."""
        rows = self.rows(m)
        if rows not in self._figures:
            self._figures[rows] = [x.at(rows) for x in self.layers]
        if (start, stop, rows) not in self._stages:
            here, figures = range(start, stop), self._figures[rows]
            stage = Stage(self.layers, figures, rows, here, is_summed=self.has_loss)
            self._stages[start, stop, rows] = stage
        return self._stages[start, stop, rows]


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
    # Where all workers are on one device, as on the CPU, shared weights are together anyway.
    ties = _ties([*layers, *after]) if len({*places}) > 1 else []
    module, looks = with_loss(layers, loss, targets), looks_of(input, have, rows)
    profile = measured(module, looks, places[0], timeout=timeout, progress=progress)
    if loss is not None:
        # The measured loss holds the targets as buffers, which ``target_bytes`` counts.
        tensors = [x for module in after for x in chain(module.parameters(), module.buffers())]
        weights = profile[-1].weights._replace(all=sum(x.nbytes for x in tensors))
        profile[-1] = replace(profile[-1], weights=weights)
    elsewhere = f"on the CPU, by devices=['cpu'] * {len(places)}"
    verify_timed([x.time(rows) for x in profile], places[0], "layers", elsewhere)
    number = {place: w for w, place in reversed([*enumerate(places)])}
    links = measured_links(places).items()
    (whole,) = scatter(input, 1)
    scale = rows / have
    problem = Problem(
        profile,
        loss is not None,
        rows,
        places,
        [],
        {(number[a], number[b]): line for (a, b), line in links},
        state_of(torch.optim.AdamW),
        scale * sum(x.nbytes for x in whole),
        scale * sum(x.nbytes for x in targets_in(targets)[0] if isinstance(x, Tensor)),
        ties=ties,
    )
    return replace(problem, memory=limits_of(None, places))


def _ties(layers: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """The pairs of layers that share a parameter or a buffer, by their numbers."""
    first: dict[Tensor, int] = {}
    tensors = ((k, x) for k, y in enumerate(layers) for x in chain(y.parameters(), y.buffers()))
    return sorted({(first[x], k) for k, x in tensors if first.setdefault(x, k) != k})
