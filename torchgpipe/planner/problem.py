"""A problem to search: a model whose layers are measured, and the devices to plan it for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.checks import checked_flag, verify_kind
from torchgpipe.partition.arguments import checked_timeout, verify_loss
from torchgpipe.planner.given import Loss, Memory, limits_of, looks_of, state_of
from torchgpipe.planner.layers import measured, measured_links
from torchgpipe.planner.memory import Stage
from torchgpipe.planner.sandbox import verify_timed
from torchgpipe.values.division import row_count
from torchgpipe.values.microbatch import scatter
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


class Problem:
    """The layers of a model, and the devices to plan it for, as they were measured.

    The arguments are those of :func:`torchgpipe.plan`, but for the input, which is one value, and
    ``modes``: the checkpoint modes of the partitions, if they are not to be searched.
    """

    def __init__(
        self,
        model: nn.Sequential,
        input: Any,
        places: Sequence[torch.device],
        rows: int,
        *,
        memory: Memory | None = None,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | float = torch.optim.AdamW,
        modes: tuple[str, ...] | None = None,
        loss: Callable[..., Any] | None = None,
        targets: Sequence[Any] = (),
        timeout: float = 1.0,
        progress: bool = False,
    ) -> None:
        rule, remedy = "targets must be the arguments of the loss", "pass such as targets=(target,)"
        verify_kind(targets, (list, tuple), rule, "targets", remedy)
        module = model
        if loss is not None:
            verify_loss(loss)
            named = OrderedDict([*model.named_children(), ("loss", Loss(loss, targets))])
            module = nn.Sequential(named)
        checked_timeout(timeout)
        progress = checked_flag(progress, "progress")
        # Trials are freed by Python's collector, so they must not hold the model, nor its input.
        self.places, self.batch, self.modes = places, rows, modes
        self.has_loss = loss is not None
        #: The bytes that each worker may use, and those of the optimizer for each byte of a
        #: parameter that it changes.
        self.memory, self.state = limits_of(memory, places), state_of(optimizer)
        have = max(1, row_count(input))
        looks = looks_of(input, have, rows)
        after = [loss] if isinstance(loss, nn.Module) else []
        #: The pairs of layers that share a weight, so they must be on one worker. Where all workers
        #: are on one device, as on the CPU, shared weights are together anyway.
        self.ties = _ties([*model, *after]) if len({*places}) > 1 else []
        #: The profile of the layers, of which the last one is the loss, if there is one.
        self.layers = measured(module, looks, places[0], timeout=timeout, progress=progress)
        if loss is not None:
            # The measured loss holds the targets as buffers, which ``target_bytes`` counts.
            size = sum(x.nbytes for y in after for x in chain(y.parameters(), y.buffers()))
            last = self.layers[-1]
            self.layers[-1] = replace(last, weights=last.weights._replace(all=size))
        elsewhere = f"on the CPU, by devices=['cpu'] * {len(places)}"
        verify_timed([x.time(rows) for x in self.layers], places[0], "layers", elsewhere)
        links, number = measured_links(places).items(), places.index
        #: For each pair of workers, the milliseconds of a copy by its bytes.
        self.links = {(number(a), number(b)): line for (a, b), line in links}
        #: Memory of the input, and of the targets, of a mini-batch.
        self.input_bytes = rows / have * sum(x.nbytes for x in scatter(input, 1)[0])
        rowed = [x for x in leaves_of(targets) if isinstance(x, Tensor)]
        self.target_bytes = rows / have * sum(x.nbytes for x in rowed)
        #: The number of layers, without the loss.
        self.count = len(self.layers) - self.has_loss
        self._figures = cache(lambda rows: [x.at(rows) for x in self.layers])
        #: For micro-batches of some rows, layers from one number up to another as a partition.
        self.stage = cache(self._stage)

    def rows(self, m: int) -> int:
        """The rows of the largest of some micro-batches."""
        return -(-self.batch // m)

    def _stage(self, rows: int, start: int, stop: int) -> Stage:
        memory, here = self._figures(rows), range(start, stop)
        return Stage(self.layers, memory, rows, here, is_summed=self.has_loss)


def _ties(layers: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """The pairs of layers that share a parameter or a buffer, by their numbers."""
    first: dict[Tensor, int] = {}
    tensors = ((k, x) for k, y in enumerate(layers) for x in chain(y.parameters(), y.buffers()))
    return sorted({(first[x], k) for k, x in tensors if first.setdefault(x, k) != k})
