"""One step: what its cells have in common, whoever orders them."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.engine.body import Body
from torchgpipe.engine.fence import Fence
from torchgpipe.engine.lanes import Lanes
from torchgpipe.engine.stages import Stages
from torchgpipe.recompute.layers import LayersState
from torchgpipe.values.order import Order

__all__: list[str] = []


class Step:
    """The knowledge of a step, besides its micro-batches, that its cells share.

    Args:
        stages: the stages of the wrapper.
        m: the number of micro-batches.
        again: the partitions with cells that are computed under checkpointing.
        joined: whether outputs of micro-batches are joined, so that the order of rows matters.
        behind: a module that runs behind the last partition, as a part of it.
    """

    def __init__(
        self,
        stages: Stages,
        m: int,
        again: Container[int],
        joined: bool,
        behind: nn.Module | None = None,
    ) -> None:
        self.stages = stages
        #: The modes of the caller.
        self.context = Context()
        #: For each partition, the module that has all of its weights.
        self.modules: list[nn.Module] = [*stages.partitions]
        if behind is not None:
            self.modules[-1] = nn.ModuleList([self.modules[-1], behind])
        #: The layers of each partition.
        self.bodies: list[Body] = []
        order: Order | None = None
        for j, (layers, x, lock) in enumerate(zip(stages.partitions, self.modules, stages.locks)):
            order = Order(layers, order) if joined else None
            state = LayersState(x, stages.learned) if j in again else None
            self.bodies.append(Body(layers, lock, state, j == 0, order))
        self.numbers = StepNumbers(stages.devices, m)

    @property
    def blocks(self) -> Container[int]:
        """The places of outputs with several rows for each row, block by block."""
        order = self.bodies[-1].order
        return order.blocks if order is not None else ()

    def end_forward(self) -> None:
        """Take note that all cells were computed."""
        for body in self.bodies:
            body.settle()


class PipelineStep(Step):
    """A step whose backward is autograd's, on lanes and held by a fence.

    Args:
        stages: the stages of the wrapper.
        m: the number of micro-batches.
        checkpointed: for each partition, how many micro-batches, from the first, are computed under
            checkpointing.
    """

    def __init__(self, stages: Stages, m: int, checkpointed: Sequence[int]) -> None:
        super().__init__(stages, m, {j for j, count in enumerate(checkpointed) if count}, True)
        self.checkpointed = checkpointed
        self.lanes = Lanes(stages)
        #: The fence, if forks and joins are needed. On the CPU alone autograd has one thread, which
        #: runs the node that was recorded last first, and so keeps the order by itself.
        self.fence: Fence | None = None
        if (
            stages.method.fence
            and torch.is_grad_enabled()
            and {*stages.devices} != {torch.device("cpu")}
        ):
            self.fence = Fence(self.lanes.ahead)
