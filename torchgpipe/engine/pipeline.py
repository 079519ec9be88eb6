"""The idea: micro-batches flow through the partitions in clock cycles.

The cell ``(i, j)`` computes micro-batch ``i`` in partition ``j``. In clock cycle ``k`` come all
cells with ``i + j = k``, each on its own device::

            k (i,j) (i,j) (i,j)
          ----- ----- ----- -----
              0 (0,0)
              1 (1,0) (0,1)
              2 (2,0) (1,1) (0,2)
              3       (2,1) (1,2)
              4             (2,2)

That is an order, and no barrier: a cell is computed as soon as what it needs has been.

Backward is autograd's. It starts from the last output, and would be free to take the micro-batches
of a partition in any order. A phony from each to the next holds it to the reverse of forward: a
micro-batch is differentiated when the one after it has been, in the same partition (in backward,
read the arrows the other way)::

            cell (i-1, j)                   cell (i, j)

                  │                              │
                  │                    ┌──────→ join [1]
                  │                    │         │
                layers               phony     layers
                  │                    │         │
                 fork [2] ─────────────┘        fork ─────→ ...
                  │                              │

An input that needs no gradient, as data does, has no gradient whose arrival could be waited for.
There the join is behind the layers [1']: a micro-batch begins to be differentiated when the one
after it has begun, which autograd then finishes first, since among what is ready it takes what was
recorded last.

A few copy streams of each partition serve all micro-batches in turn. In backward, a device that got
ahead of the one before it by as many micro-batches would put a gradient on a copy stream that still
has to pass on an earlier one, which would then wait for it. So the host does not issue a cell
before the cell so many micro-batches later in the partition before: its phony leads there, too [3].
In forward a cell waits for the one so many micro-batches before it in the next partition.

What arrives from another stream is joined by Copy itself. On the CPU alone there is no fence:
autograd has one thread there, which takes what was recorded last first.

Source: Huang et al., GPipe (arXiv 1811.06965); Kim et al., torchgpipe (arXiv 2004.09910).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import Draws, holding
from torchgpipe.autograd.queue import leave_nothing
from torchgpipe.devices.streams import Streams
from torchgpipe.engine.cell import Cell, starts_in_place
from torchgpipe.engine.lanes import Routes
from torchgpipe.engine.workers import Task, Workers
from torchgpipe.recompute.layers import LayersState
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Generates, for each clock cycle, the cells ``(i, j)`` of it.

    Args:
        m: the number of micro-batches.
        n: the number of partitions.
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n))]


class Pipeline:
    """One forward of all micro-batches through all partitions.

    Args:
        partitions: the layers, partition by partition.
        devices: the device of each partition.
        batches: the micro-batches; each is replaced by its output.
        checkpoint_stop: how many micro-batches, from the first, are computed under checkpointing.
        groups: which partitions share layers.
        locks: of each partition, held while it computes.
        skip_layout: which skips lead past partitions.
        streams: where the streams of the devices come from.
        workers: what issues the cells.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        batches: list[Batch],
        *,
        checkpoint_stop: int,
        groups: Sequence[int],
        locks: Sequence[AbstractContextManager[Any]],
        skip_layout: SkipLayout,
        streams: Streams,
        workers: Workers,
    ) -> None:
        self.partitions = partitions
        self.devices = devices
        self.batches = batches
        self.checkpoint_stop = checkpoint_stop
        self.locks = locks
        self.skip_layout = skip_layout
        self.workers = workers
        self.context = Context()
        self.states = [LayersState(layers) if checkpoint_stop else None for layers in partitions]
        self.in_place = [starts_in_place(layers) for layers in partitions]
        self.draws = Draws(devices, len(batches))
        self.routes = Routes(partitions, devices, groups, skip_layout, streams)
        #: Whether backward would not keep that order by itself. Autograd takes what was recorded
        #: last first, but has a thread for the CPU and one for each accelerator.
        self.fenced = torch.is_grad_enabled() and {*devices} != {torch.device("cpu")}
        #: What was branched off each cell, for those to be differentiated before it.
        self.phonies: dict[tuple[int, int], list[Tensor]] = {}
        #: Of each micro-batch, what was stashed and not popped yet.
        self.skips = [SkipTracker() for _ in batches]
        #: Which of these share memory with something.
        self.shared: list[set[Any]] = [set() for _ in batches]

    def run(self) -> None:
        """Computes all cells, each as soon as those are done that it needs."""
        m, n = len(self.batches), len(self.partitions)
        tasks = [
            Task((i, j), self.devices[j], partial(self.step, i, j), self.routes.needs(i, j, m))
            for cycle in clock_cycles(m, n)
            for i, j in cycle
        ]
        self.context.over = False
        holding(self.draws.locks, partial(self._run, tasks))
        self.context.over = True
        self.batches[:] = self.routes.back_to_caller(self.batches)
        if any(device.type == "cpu" for device in self.devices):
            # guard: what a backward leaves
            leave_nothing(self.batches[-1])
        for state in self.states:
            if state is not None:
                state.settle()

    def _run(self, tasks: Sequence[Task]) -> None:
        with self.draws:
            # The caller may have changed parameters, and will change them, or read buffers.
            # guard: after the caller
            self.routes.wait_for_caller()
            try:
                self.workers.run(tasks, self.context)
            finally:
                # guard: before the caller
                self.routes.have_caller_wait()

    def step(self, i: int, j: int) -> None:
        """Computes a cell, between the two ends of the fence that orders backward."""
        cell = self.cell(i, j)
        batch = self.batches[i]
        if self.skip_layout.popped[j]:
            with cell.named:
                popped = {skip: self.skips[i].load(skip) for skip in self.skip_layout.popped[j]}
            batch = batch.with_skips(popped, self.shared[i])
            # What is popped is held by nobody here: it is let go at its last use.
            # guard: letting go of a skip
            del popped
        phonies = self.phonies_for(i, j) if self.fenced else []
        # guard: join [1] before the layers
        if batch.requires_grad:
            # guard: join [1]
            batch = cell.arrive(batch, phonies)  # [1]
            batch = cell.compute(batch)
        else:
            batch = cell.arrive(batch)
            batch = cell.compute(batch)
            # guard: join [1']
            batch = cell.join(batch, phonies)  # [1']
        if self.fenced:
            last = i + 1 == len(self.batches)
            # guard: fork [2]
            batch, self.phonies[i, j] = cell.fork(batch, last)  # [2]
        self.skips[i].values.update(batch.skips)
        self.shared[i] |= batch.shared
        self.batches[i] = batch = batch.with_skips({})
        if len(batch) < 2 and not self.skips[i].values:
            # Nothing is left that it could share memory with.
            batch.shared = frozenset()

    def phonies_for(self, i: int, j: int) -> list[Tensor]:
        """The phonies of those cells that are to be differentiated after this one."""
        lead = self.routes.lead
        # guard: lead [3]
        cells = [(i - 1, j), *[(i - lead, k) for k in self.routes.held_by[j]]]  # [3]
        return [phony for cell in dict.fromkeys(cells) for phony in self.phonies.get(cell, ())]

    def cell(self, i: int, j: int) -> Cell:
        """The cell of micro-batch ``i`` in partition ``j``."""
        routes = self.routes
        return Cell(
            i,
            j,
            self.partitions[j],
            stream=routes.compute[j],
            lanes={
                part: routes.lane(i, j, part) for part in (*routes.sources[j], *routes.targets[j])
            },
            arriving={part: routes.lane(i, k, part) for part, k in routes.sources[j].items()},
            departing=routes.targets[j],
            context=self.context,
            lock=self.locks[j],
            numbers=self.draws.of(i, self.devices[j]),
            state=self.states[j],
            checkpoint=i < self.checkpoint_stop,
            starts_in_place=self.in_place[j],
        )
