"""One step: what the cells of one forward, and of its backward, have in common."""

from __future__ import annotations

import torch
from torch import nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.engine.lanes import Lanes
from torchgpipe.engine.stages import Stages
from torchgpipe.recompute.layers import LayersState

__all__: list[str] = []


class Step:
    """The knowledge of a step, besides its micro-batches, that its cells share.

    Args:
        stages: the stages of the wrapper.
        m: the number of micro-batches.
        checkpointed: how many micro-batches, from the first, are computed under checkpointing.
    """

    def __init__(self, stages: Stages, m: int, checkpointed: int) -> None:
        self.stages = stages
        self.m = m
        self.checkpointed = checkpointed
        #: The modes of the caller.
        self.context = Context()
        #: The state of each partition's layers, for second runs; None in a step without any.
        self.states = [LayersState(x) if checkpointed else None for x in stages.partitions]
        #: For each partition, whether the first layer changes its input in place.
        self.in_place = [starts_in_place(layers) for layers in stages.partitions]
        self.numbers = StepNumbers(stages.devices, m)
        self.lanes = Lanes(stages)
        #: Whether forks and joins are needed. On the CPU alone autograd has one thread, which runs
        #: the node that was recorded last first, and so keeps the order by itself.
        self.fenced = (
            stages.method.fence
            and torch.is_grad_enabled()
            and {*stages.devices} != {torch.device("cpu")}
        )

    def end_forward(self) -> None:
        """Take note that all cells were computed."""
        for state in self.states:
            if state is not None:
                state.settle()


def starts_in_place(layer: nn.Module) -> bool:
    """Whether the first layer is one of torch's with ``inplace=True``."""
    while isinstance(layer, nn.Sequential) and layer._modules:
        # Indexing a Sequential takes several times as long.
        layer = next(iter(layer._modules.values()))
    return getattr(layer, "inplace", False) is True
