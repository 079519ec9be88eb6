"""One step: its cells have in common a fence, lent weights, and the state around them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.autograd.copy import copy, shared, wait
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    get_device,
    has_streams,
    use_stream,
    wait_stream,
)
from torchgpipe.engine.body import Body
from torchgpipe.engine.lanes import Lanes
from torchgpipe.engine.stages import Stages
from torchgpipe.partition.keeping import (
    Keeping,
    checkpointed,
    offload_of,
    policy_of,
    recomputed_by,
)
from torchgpipe.partition.placement import Lent, TableEntry
from torchgpipe.recompute.checkpoint import Checkpoint, trigger
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.recompute.offload import Offloading
from torchgpipe.schedule.trips import leaving
from torchgpipe.values.microbatch import VALUE
from torchgpipe.values.order import Order

__all__: list[str] = []


class Fence:
    """The forks and joins of a step, which fix the order in which backward comes to its cells.

    ``torchgpipe/engine/pipeline.py`` has a picture. The index ``j`` is a partition, or a stage of a
    device map.

    Args:
        ahead: for each ``j`` and each ``k`` that it sends to, by how many micro-batches ``k`` may
            be ahead of ``j`` in backward. Of these numbers the first one counts whose cell exists.
    """

    def __init__(self, ahead: dict[int, dict[int, range]]) -> None:
        self.ahead = ahead
        self._phonies: dict[tuple[int, int], list[Tensor]] = {}

    def before(self, i: int, j: int) -> list[Tensor]:
        """The phonies of the cells that backward shall come to after the cell ``(i, j)``."""
        # Under a device map, micro-batch i - 1 may have no cell in j. Then an earlier one counts.
        phonies = self._first(i, range(1, i + 1), j)
        # A copy of the dict's items, since another thread may add a stage meanwhile.
        for k, ahead in [*self.ahead[j].items()]:
            # guard: lead [3]
            phonies = phonies + self._first(i, ahead, k)
        return phonies

    def fork(
        self, i: int, j: int, checkpoints: Sequence[Checkpoint], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Branch a phony off tensors that leave the cell ``(i, j)``, to be joined by other cells.

        The node belongs to the current stream, and its backward recomputes the checkpoints, if any.
        """
        tensors, phony = trigger(checkpoints, tensors)
        self._phonies.setdefault((i, j), []).append(phony)
        return tensors

    def _first(self, i: int, ahead: range, j: int) -> list[Tensor]:
        for a in ahead:
            if (i - a, j) in self._phonies:
                return self._phonies[i - a, j]
        return []


class StepWeights:
    """The copies, in one step, of weights that layers on several devices share."""

    def __init__(
        self,
        lanes: Mapping[torch.device, AbstractStream],
        outside: Mapping[torch.device, AbstractStream],
    ) -> None:
        self._lanes, self._outside = lanes, outside
        #: For a weight's ``id()``, its version, and whether it needs a backward: the weight, with
        #: its alias for each device. So a weight that changes between two cells gets new aliases.
        self._shared: dict[object, tuple[Tensor, dict[torch.device, Tensor]]] = {}

    def bring(
        self, compute: AbstractStream, lane: AbstractStream, weights: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copy weights to a device; weights that are there already get an alias."""
        return [self._brought(compute, lane, x) for x in weights]

    def _brought(self, compute: AbstractStream, lane: AbstractStream, weight: Tensor) -> Tensor:
        device = get_device(compute)
        if not (has_streams(weight.device) and has_streams(device)):
            return weight.to(device)
        source = self._lanes[weight.device]
        alias = self._aliases(weight, source)[device]
        if weight.device == device:
            return alias
        # The source is a lane of the weight's device. The compute stream as the source would wait
        # in backward for the gradient from the other device.
        with use_stream(lane):
            arriving = copy(source, lane, alias)
        with use_stream(compute):
            return wait(lane, compute, *arriving)[0]

    def _aliases(self, weight: Tensor, lane: AbstractStream) -> dict[torch.device, Tensor]:
        """Make an alias of a weight for each device, ready for a lane of the weight's device."""
        key = id(weight), version_of(weight), needs_backward((weight,))
        if key not in self._shared:
            caller, count = self._outside[weight.device], len(self._outside)
            with use_stream(caller):
                aliases = shared(weight, count) if needs_backward((weight,)) else (weight,) * count
            self._shared[key] = weight, dict(zip(self._outside, aliases))
            # guard: weights that are lent
            wait_stream(lane, caller)
        return self._shared[key][1]


class Step:
    """The knowledge of a step, besides its micro-batches, that its cells share."""

    def __init__(
        self,
        stages: Stages,
        m: int,
        again: Container[int],
        joined: bool,
        after: nn.Module | None = None,
    ) -> None:
        self.stages = stages
        #: The settings of the caller's thread, such as autocast, for any thread that runs cells.
        self.context = Context()
        #: For each partition, a module with its weights, in the last also those of a loss module.
        self.modules: list[nn.Module] = [*stages.partitions]
        if after is not None:
            self.modules[-1] = nn.ModuleList([self.modules[-1], after])
        self.bodies: list[Body] = []
        order: Order | None = None
        for j, (layers, x, lock) in enumerate(zip(stages.partitions, self.modules, stages.locks)):
            order = Order(layers, order) if joined else None
            state = LayersState(x, stages.learned) if j in again else None
            self.bodies.append(Body(layers, lock, state, j == 0, order))
        self.numbers = StepNumbers(stages.devices, m)

    @property
    def blocks(self) -> Container[int]:
        """The indices of outputs with several rows for each input row, in blocks of all rows."""
        order = self.bodies[-1].order
        return order.blocks if order is not None else ()

    def end_forward(self) -> None:
        """Take note that all cells were computed."""
        for body in self.bodies:
            body.end_forward()


class PipelineStep(Step):
    """A step whose backward is autograd's, on lanes and held by a fence."""

    def __init__(self, stages: Stages, m: int, modes: Sequence[Keeping]) -> None:
        #: For each partition, how many micro-batches, counted from the first, are checkpointed.
        self.checkpointed = [checkpointed(recomputed_by(mode), m) for mode in modes]
        super().__init__(stages, m, {j for j, count in enumerate(self.checkpointed) if count}, True)
        recorder = None if stages.recording is None else stages.recording.recorder
        for j, (body, mode, device) in enumerate(zip(self.bodies, modes, stages.devices)):
            if not isinstance(mode, str) or mode == "offload":
                body.policy = policy_of(mode)
                offload = offload_of(mode)
                if offload is not None and has_streams(device):
                    memory = stages.pool.host(device)
                    body.offloading = Offloading(memory, offload, j, leaving(m), recorder)
        self.lanes = Lanes(stages)
        if any(stages.lent):
            self._copy_shared_weights()
        #: Keeps backward in the reverse order of forward; None without backward, and on the CPU
        #: alone, where autograd's one thread takes, of the ready nodes, the one recorded last.
        self.fence: Fence | None = None
        if torch.is_grad_enabled() and {*stages.devices} != {torch.device("cpu")}:
            self.fence = Fence(self.lanes.ahead)

    def _copy_shared_weights(self) -> None:
        """Have partitions compute with copies of weights that they share with other devices."""
        devices, compute = self.stages.devices, self.lanes.compute
        lanes = [self.lanes.lane(0, j, VALUE) for j in range(len(devices))]
        weights = StepWeights(
            dict(zip(devices, lanes)), {device: current_stream(device) for device in devices}
        )
        for body, entries, stream, lane in zip(self.bodies, self.stages.lent, compute, lanes):
            compute_with_copies(body, entries, partial(weights.bring, stream, lane))


def compute_with_copies(
    body: Body, entries: Sequence[TableEntry], bring: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> None:
    """Have a partition compute with the copies that a function makes of some of its weights."""
    if entries:
        body.call = partial(Lent(entries, bring, body.lock).call, body.layers)
