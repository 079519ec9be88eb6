"""One step: what its cells have in common, whoever orders them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.devices.streams import current_stream
from torchgpipe.engine.body import Body
from torchgpipe.engine.fence import Fence
from torchgpipe.engine.lanes import Lanes
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.weights import Weights
from torchgpipe.partition.keeping import Keeping, offload_of, policy_of
from torchgpipe.partition.lent import Lent, Place
from torchgpipe.recompute.layers import LayersState
from torchgpipe.recompute.offload import offloading_of
from torchgpipe.values.microbatch import VALUE
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
        modes: for each partition, the mode that says what cells keep besides.
    """

    def __init__(
        self,
        stages: Stages,
        m: int,
        checkpointed: Sequence[int],
        modes: Sequence[Keeping] = (),
    ) -> None:
        super().__init__(stages, m, {j for j, count in enumerate(checkpointed) if count}, True)
        self.checkpointed = checkpointed
        stages.pool.begin_step()
        recorder = None if stages.recording is None else stages.recording.recorder
        for j, (body, mode, device) in enumerate(zip(self.bodies, modes, stages.devices)):
            if not isinstance(mode, str) or mode == "offload":
                body.policy = policy_of(mode)
                offload = offload_of(mode)
                body.offloading = offloading_of(offload, stages.pool, device, j, m, recorder)
        self.lanes = Lanes(stages)
        if any(stages.lent):
            self._lend()
        #: The fence, if forks and joins are needed. On the CPU alone autograd has one thread, which
        #: runs the node that was recorded last first, and so keeps the order by itself.
        self.fence: Fence | None = None
        if (
            stages.method.fence
            and torch.is_grad_enabled()
            and {*stages.devices} != {torch.device("cpu")}
        ):
            self.fence = Fence(self.lanes.ahead)

    def _lend(self) -> None:
        """Have partitions compute with copies of weights that others have, too."""
        devices, compute = self.stages.devices, self.lanes.compute
        lanes = [self.lanes.lane(0, j, VALUE) for j in range(len(devices))]
        weights = Weights(
            dict(zip(devices, lanes)), {device: current_stream(device) for device in devices}
        )
        for body, places, stream, lane in zip(self.bodies, self.stages.lent, compute, lanes):
            lend(body, places, partial(weights.bring, stream, lane))


def lend(
    body: Body, places: Sequence[Place], bring: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> None:
    """Have a partition compute with what a function makes of some tensors.

    Args:
        body: the partition, with its lock.
        places: the places of the tensors.
        bring: the function.
    """
    if places:
        body.call = partial(Lent(places, bring, body.lock).call, body.layers)
