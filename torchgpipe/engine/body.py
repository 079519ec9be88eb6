"""The body of a cell: the layers of a partition, which run once, or twice under checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchgpipe.ambient.context import Context
from torchgpipe.autograd.versions import counter_of, version_of
from torchgpipe.devices.streams import AbstractStream
from torchgpipe.partition.keeping import Policy
from torchgpipe.recompute.buffers import Copied
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.recompute.offload import Offloading
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.recompute.selective import Contexts, contexts_of
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.order import Order

__all__: list[str] = []

NOTHING: AbstractContextManager[None] = nullcontext()


class Body:
    """The layers of one partition in one step.

    The autograd graph holds a body until its recomputation. So a body knows nothing of other
    partitions, whose memory it would keep.

    Args:
        layers: the partition.
        lock: a lock to hold while the layers run.
        state: the state of the layers, for recomputations; None in a step without any.
        first: whether this is the first partition.
        order: the order of rows that the layers return; None where nobody joins them.
    """

    __slots__ = (
        *("call", "first", "in_place", "layers", "lock", "offloading", "order"),
        *("policy", "state"),
    )

    def __init__(
        self,
        layers: nn.Module,
        lock: AbstractContextManager[Any],
        state: LayersState | None,
        first: bool,
        order: Order | None = None,
    ) -> None:
        self.layers = layers
        #: Runs the layers: the partition itself or, if it shares weights with another device, a
        #: function that has it compute with copies of these weights.
        self.call: Callable[..., Any] = layers
        self.order = order
        self.lock = lock
        self.state = state
        #: Copies what cells save for backward to the host; None if all of it stays on the device.
        self.offloading: Offloading | None = None
        #: A policy of PyTorch's selective checkpointing: it names operators whose results are kept,
        #: so that recomputations do not run them. None if recomputations run everything.
        self.policy: Policy | None = None
        self.first = first
        self.in_place = starts_in_place(layers)

    def run(
        self,
        batch: Batch,
        copies: list[Copied] | None = None,
        after: Callable[[Batch], Batch] | None = None,
        contexts: Contexts | None = None,
        call: Callable[..., Any] | None = None,
    ) -> Batch:
        """Run the layers on a micro-batch.

        Args:
            batch: the micro-batch.
            copies: under checkpointing, an empty list for the first run, which puts copies of
                buffers there; the same list for the recomputation.
            after: what runs after the layers, as a part of them.
            contexts: the context managers of a policy, for the first run and the recomputation.
            call: calls the layers; by default :attr:`call`.

        Raises:
            RuntimeError: a layer changed a tensor in place that shares memory with another part.
        """
        # The value and the skips of a micro-batch may share memory. Then a layer that changes one
        # of these in place changes the others, but not their copies on other devices. Results must
        # not depend on devices, so the change is always an error.
        counters: list[Tensor] = []
        versions: list[int] = []
        if batch.shared:
            # guard: letting go of what is watched
            counters = [counter_of(x) for part in batch.shared for x in batch.parts.get(part, ())]
            versions = [version_of(x) for x in counters]
        if self.in_place:
            if VALUE not in batch.shared:
                if self.state or self.first:
                    # The first layer changes a clone in place. A recomputation needs the input
                    # unchanged, and the first partition may get a view of the caller's tensor.
                    batch = batch.take().map(lambda *xs: [x.clone() for x in xs], [VALUE])
            elif -1 in versions:
                # The first layer would change an inference tensor in place. Its version is always
                # -1, so comparing versions after the layers would not find the change.
                raise _changed(batch)
        # From here on the tracker alone holds the skips, and drops a skip when a layer pops it.
        tracker = SkipTracker.of(batch)
        value = batch.take().with_skips({})
        order = self.order
        run = value.call if order is None or order.known else partial(self._ordered, order, value)
        call = call or self.call
        policy = NOTHING if contexts is None else contexts[is_recomputing()]
        # guard: a partition at a time
        # guard: operators around the layers
        with self.lock, self._around(copies), policy, use_skip_tracker(tracker):
            output = run(call)
            if after is not None:
                output = after(output)
            if tracker.values:
                output = output.with_skips(tracker.parts())
        if counters and versions != [version_of(x) for x in counters]:
            raise _changed(value)
        if VALUE in value.shared and output.aliases(value):
            output.shared |= {VALUE}
        return output

    def checkpoint(
        self,
        run: Callable[..., Batch],
        context: Context,
        stream: AbstractStream,
        within: AbstractContextManager[None],
    ) -> Checkpoint:
        """A checkpoint of a cell."""
        state = self.state
        assert state is not None
        if state.buffers.any:
            run = partial(run, copies=[])
        if self.policy is not None:
            run = partial(run, contexts=contexts_of(self.policy))
        return Checkpoint(
            *(run, context, stream, within, state.lasting, state.always_calls, state.shapes)
        )

    def end_forward(self) -> None:
        """Take note that all micro-batches were computed."""
        if self.state is not None:
            self.state.end_forward()
            self.state.buffers.end_forward()
        if self.offloading is not None:
            self.offloading.end()

    def _ordered(self, order: Order, value: Batch, call: Callable[..., Any]) -> Batch:
        """Call the layers, and look at the order of the rows that they return."""
        if self.state and is_recomputing():
            return value.call(call)
        with order.begin(value.parts[VALUE]):
            output = value.call(call)
        order.end(value.parts[VALUE], output.parts[VALUE])
        return output

    def _around(self, copies: list[Copied] | None) -> AbstractContextManager[None]:
        """A context manager for the state of the layers, in this run."""
        if self.state:
            if is_recomputing():
                return self.state.restored(() if copies is None else copies)
            if copies is not None:
                return self.state.buffers.first_run(copies)
        return NOTHING


def starts_in_place(layer: nn.Module) -> bool:
    """Whether the first layer is one of torch's with ``inplace=True``."""
    while isinstance(layer, nn.Sequential) and layer._modules:
        # Not layer[0]: indexing a Sequential takes several times as long.
        layer = next(iter(layer._modules.values()))
    return getattr(layer, "inplace", False) is True


def _changed(batch: Batch) -> RuntimeError:
    return RuntimeError(
        "what passes between partitions, skips included, must not be views of one tensor where a "
        f"later partition changes one in place (shapes: {[tuple(x.shape) for x in batch]}); clone "
        "one of them, or what is stashed, or have both layers in one partition"
    )
