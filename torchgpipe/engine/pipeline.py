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

A clock cycle is an order and not a barrier. On accelerators the caller issues all cells in this
order, and each waits on its stream for what it needs. On the CPU, or where cells block the host, a
thread for each device computes its cells, each as soon as those that it needs on other devices have
been.

Autograd runs backward. It starts from the last output, and may take the micro-batches of a
partition in any order. The fence holds it to the reverse of forward. It is made of phonies, empty
tensors that only carry a dependency: a fork makes one of a tensor, a join has another tensor wait
for it (``torchgpipe/autograd/fork_join.py``). A phony leads from each micro-batch to the next one
in the same partition, so that backward comes to a micro-batch only after the next one. In backward,
read the arrows the other way::

            cell (i-1, j)                   cell (i, j)

                  │                              │
                  │                    ┌──────→ join [1]
                  │                    │         │
                layers               phony     layers
                  │                    │         │
                 fork [2] ─────────────┘        fork ─────→ ...
                  │                              │

An input that requires no gradient, as data does, has no gradient whose arrival could be waited for.
There the join is after the layers [1']: backward begins with a micro-batch when it has begun with
the next one. It finishes the next one first, since autograd, among the nodes that are ready, runs
the one that was recorded last.

Backward has a thread for each device. One that ran ahead would send gradients before they are
needed, and these take memory. So a phony [3] leads from the cell ``(i, j + 1)`` to ``(i + 2, j)``,
and backward computes ``(i, j + 1)`` only after ``(i + 2, j)``. In backward's own clock cycles::

          partition j        partition j+1
          -----------        -------------
                               (i+2, j+1)
           (i+2, j) ───╮       (i+1, j+1)
           (i+1, j)    ╰─[3]─→ (i,   j+1)

The cell that is waited for is one cycle earlier, so no thread waits for a neighbour that keeps up
with it. At most one gradient is early, or two after a join [1']. Where a skip goes from ``j`` to
``k``, ``(i, k)`` comes after ``(i + k - j + 1, j)`` in the same way.

Each partition has a small pool of copy streams, used round-robin. If a device ran ahead by a whole
pool, its parts would queue behind older ones. The lead is the number of micro-batches that it may
be ahead: in forward, the cell ``(i + lead, j)`` waits for the cell ``(i, j+1)``. Where cells block
the host, forward is not in the order of the clock cycles, and the cell that [3] asks for may not be
there yet. Then it is the latest cell of partition ``j`` that is there, up to a lead before.

Copy itself joins phonies for what arrives from another stream. On the CPU alone there is no fence:
autograd has one thread there, which keeps the order by itself.

``docs/glossary.rst`` has the words: lane, lead, phony, fence.

Source: Huang et al., GPipe (arXiv 1811.06965); Kim et al., torchgpipe (arXiv 2004.09910).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torchgpipe.ambient import labels
from torchgpipe.ambient.generators import holding
from torchgpipe.ambient.notes import noted
from torchgpipe.autograd.nodes import drain_after_failure
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import PipelineStep
from torchgpipe.engine.workers import Task
from torchgpipe.partition.keeping import Keeping
from torchgpipe.skip.tracker import Parcels
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Generate the cells ``(i, j)`` of each clock cycle."""
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n))]


class Pipeline:
    """One forward of all micro-batches through all partitions."""

    def __init__(self, stages: Stages, batches: list[Batch], modes: Sequence[Keeping]) -> None:
        self.stages = stages
        self.batches = batches
        self.step = PipelineStep(stages, len(batches), modes)
        #: For each micro-batch, the skips that were stashed and not popped yet.
        self.parcels = [Parcels() for _ in batches]

    def run(self) -> None:
        """Compute all cells, each as soon as the cells that it needs are done."""
        m, n = len(self.batches), len(self.stages.partitions)
        devices, lanes = self.stages.devices, self.step.lanes
        tasks = [
            Task((i, j), devices[j], partial(self.run_cell, i, j), lanes.needs(i, j, m))
            for cycle in clock_cycles(m, n)
            for i, j in cycle
        ]
        if self.stages.recording is not None:
            self.stages.recording.begin_step()
        self.step.context.over = False
        holding(self.step.numbers.locks, partial(self._run, tasks))
        self.step.context.over = True
        self.batches[:] = lanes.back_to_caller(self.batches)
        if any(device.type == "cpu" for device in devices):
            # guard: what a backward leaves
            drain_after_failure(self.batches[-1])
        self.step.end_forward()

    def _run(self, tasks: Sequence[Task]) -> None:
        with self.step.numbers:
            # Partitions wait for the caller's streams, on which the caller may have changed
            # parameters. When the tasks are done, the caller's streams wait for partitions: the
            # caller may change parameters again, or read buffers.
            # guard: after the caller
            self.step.lanes.wait_for_caller()
            try:
                self.stages.workers.run(tasks, self.step.context)
            finally:
                # guard: before the caller
                self.step.lanes.have_caller_wait()

    def run_cell(self, i: int, j: int) -> None:
        """Compute a cell under its label, if somebody observes devices."""
        with labels.within(labels.of("F", j, i)):
            self._run_cell(i, j)

    def _run_cell(self, i: int, j: int) -> None:
        """Compute a cell, between the two ends of the fence that orders backward."""
        cell = Cell(self.step, i, j)
        batch = self.batches[i]
        popped = self.stages.skip_layout.popped[j]
        if popped:
            with noted(cell):
                batch = self.parcels[i].unpacked(batch, popped)
        fence = self.step.fence
        phonies = fence.before(i, j) if fence else []
        # Each call enters the stream that is named beside it, and autograd runs its backward there.
        # A lane is the stream of a copy between devices; without a copy it is the compute stream.
        # guard: join [1] before the layers
        if batch.requires_grad:
            # guard: join [1]
            batch = cell.arrive(batch, phonies)  # on the lane of the input
            batch = cell.compute(batch)  # on the compute stream
        else:
            # Backward does not come to arrive() for such an input, so the phonies join the output.
            batch = cell.arrive(batch)  # on the lane of the input
            batch = cell.compute(batch)  # on the compute stream
            # guard: join [1']
            batch = cell.merge(batch, phonies)  # on the lane of the output
        if fence:
            is_last = i + 1 == len(self.batches)
            # guard: fork [2]
            batch = cell.branch(batch, fence, is_last)  # on the lane of the output
        self.batches[i] = self.parcels[i].packed(batch)
