"""Checkpointing: what a cell saves for backward is dropped, and computed again when it is due.

The cell runs once, as always, and autograd records it as always; but each tensor that it saves
for backward is exchanged for an empty :class:`Slot`, unless it is there anyway, as weights and the
input of the cell are. In backward, before the gradient of the micro-batch arrives,
:class:`Recompute` runs the cell a second time, and the tensors that this run saves fill the slots
in the same order. It ends with the last tensor that was dropped, if weights come behind it, and the
second graph is thrown away. Where nothing was dropped, there is no second run.

So there is one graph, the cell's own: parameters receive their gradients from it once,
``torch.autograd.grad`` and double backward see what they see without checkpointing.

::

    forward:   input ── layers ── Recompute ── output
                 │        ○ ○                            ○ slot
                 └──── kept ────────┐
                                    ↓
    backward:  input ←─ layers ←─ Recompute ←─ gradient
                          ● ●       │
                           ↑        │
                           └─ layers, again

:class:`Recompute` lets the gradient through. Where the gradient comes from another device, it
belongs to the copy stream on which that arrives, but it recomputes on the compute stream, which
therefore does not wait for the gradient: only the host has to know that it is on its way. Where
the output stays, there is nothing to wait for, and the first slot that is asked for is soon enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import Context
from torchgpipe.ambient.modes import Hooks, current_hooks, is_within_autocast, own_casts
from torchgpipe.ambient.random_numbers import RNGState, holding
from torchgpipe.ambient.running import running
from torchgpipe.ambient.snapshot import Snapshot
from torchgpipe.autograd.fork_join import fork, needs_backward, pass_on
from torchgpipe.autograd.phony import get_phony
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    get_device,
    has_streams,
    use_stream,
)
from torchgpipe.recompute.input import Kept
from torchgpipe.recompute.slots import (
    Compared,
    Enough,
    Filling,
    Lasting,
    Slot,
    described,
    dropped,
    mismatch,
)
from torchgpipe.values.microbatch import Batch

__all__ = ["is_checkpointing", "is_recomputing"]


@uncompiled
def is_checkpointing() -> bool:
    """Whether this thread runs a layer whose saved tensors are dropped, to be recomputed."""
    return running.checkpointing


@uncompiled
def is_recomputing() -> bool:
    """Whether this thread runs a layer for the second time, within backward.

    A layer that does something once per micro-batch, such as counting, asks this first::

        class Counter(nn.Module):
            count = 0

            def forward(self, input):
                if not is_recomputing():
                    self.count += 1
                return input
    """
    return running.recomputing


class _flag:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.previous = getattr(running, self.name)
        setattr(running, self.name, True)

    def __exit__(self, *_: object) -> None:
        setattr(running, self.name, self.previous)


class Checkpoint:
    """One run of a function that can be repeated to obtain what it saved for backward.

    Args:
        function: what to run; a second run on the same input must save the same tensors.
        context: the modes of the caller, for both runs.
        stream: the stream on which it computes, for both runs.
        within: a context manager to recompute in.
        lasting: the identities of tensors that are not to be computed again, nor views of them:
            they stay as they are, as weights do.
        whole: whether a second run always goes to the end.
    """

    def __init__(
        self,
        function: Callable[[Batch], Batch],
        context: Context,
        stream: AbstractStream,
        within: AbstractContextManager[None],
        lasting: Set[int] = frozenset(),
        whole: bool = False,
    ) -> None:
        self.function = function
        self.context = context
        self.stream = stream
        self.within = within
        self.lasting = lasting
        self.whole = whole
        self.slots: list[Slot] = []
        #: The identities of the tensors of the input, while they cannot be others'.
        self.inputs: set[int] = set()
        self.kept: tuple[Kept, RNGState] | None = None
        self.lock = threading.RLock()

    def forward(self, batch: Batch) -> Batch:
        """Runs the function, saving nothing but its input.

        Raises:
            RuntimeError: the function changed its input in place.
        """
        # guard: what is kept is packed
        kept = Kept(batch, _hooks_of_caller())
        if kept.hooks is None:
            inputs = [x for tensor in batch for x in (tensor, tensor._base)]
            self.inputs = {id(x) for x in inputs if x is not None}
        rng = RNGState(get_device(self.stream))
        with _flag("checkpointing"), saved_tensors_hooks(self._drop, self._unpack):
            output = self.function(batch.copy())
        self.inputs.clear()
        for slot in self.slots:
            if isinstance(slot, (Lasting, Compared)):
                slot.close()
        if not kept.unchanged:
            raise RuntimeError(
                "under checkpointing, a partition must not change its input in place, nor what it "
                "pops, since it is computed again from these; have the layer compute out of "
                "place, or clone the tensor there"
            )
        if all(slot.lasting for slot in self.slots):
            # Nothing was dropped: there will be no second run.
            self.slots = []
            del self.function, self.lasting, self.context
        else:
            rng.settle()
            kept.pack()
            self.kept = kept, rng
        return output

    def fork(self, outputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Branches a phony off outputs, whose gradients trigger the recomputation.

        It belongs to the current stream. Outputs for which that is not done trigger it when their
        gradients come to the first tensor that was dropped.
        """
        # guard: no Recompute for nothing
        if self.kept is None or not needs_backward(outputs):
            return fork(outputs)
        *tensors, phony = Recompute.apply(self, *outputs)
        return tuple(tensors), phony

    def recompute(self) -> None:
        """Fills the slots, unless that was done, and lets go of the input.

        Raises:
            RuntimeError: the input was changed in place since, or the function saves otherwise
                than it did.
        """
        # Several threads may differentiate one graph on the CPU.
        with self.lock:
            if self.kept is None:
                return
            if not self.context.over:
                raise _not_within_forward()
            # From here on, each slot is held by the node that saved it, and by nothing else.
            # guard: letting go of slots
            slots, self.slots = self.slots, []
            try:
                self._repeat(slots)
            except BaseException:
                # What is there may be wrong, and must not be taken for right by another backward.
                for slot in slots:
                    slot.empty()
                raise
            finally:
                # The graph lives on, and may be what layers or hooks refer to.
                del self.function, self.lasting, self.context

    def _repeat(self, slots: Sequence[Slot]) -> None:
        assert self.kept is not None
        device = get_device(self.stream)
        if has_streams(device) and torch._C._is_multithreading_enabled():
            # The thread is one of autograd's own.
            self.context.lend_threads()
        found = Snapshot([device], self.context.modes)
        within = is_within_autocast(found.modes)
        # guard: stream of recomputation
        with found, use_stream(self.stream), self.within:
            # guard: letting go of what was kept
            (kept, rng), self.kept = self.kept, None
            # In the modes of backward, as the caller's hooks are called elsewhere. Its memory is
            # from here on the second run's alone.
            again = kept.unpack()
            del kept
            with self.context.entered(found), own_casts() if within else nullcontext():
                holding(rng.locks, partial(self._fill, slots, rng, again))

    def _fill(self, slots: Sequence[Slot], rng: RNGState, again: Batch) -> None:
        # What is behind the last dropped tensor is not needed, but to compare all that was done. It
        # is left out where it computes with weights, since an exception takes its time, too.
        lasting = [slot for slot in slots if isinstance(slot, Lasting)]
        compared = [slot for slot in slots if isinstance(slot, Compared)]
        # guard: to the end after a change
        # guard: to the end for hooks
        whole = self.whole or rng.drawn or bool(compared) or any(x.changed for x in lasting)
        filling = Filling(slots, whole or not slots[-1].lasting)
        for kept in lasting:
            kept.open()
        hooks = saved_tensors_hooks(filling.next, _not_saved)
        try:
            # guard: random numbers
            with rng.restored(), _flag("recomputing"), hooks:
                # guard: context variables
                self.context.run(self.function, again)
        except Enough:
            pass
        except Exception:
            # All slots are full: whatever came after the end is a consequence of it.
            if filling.whole or filling.left:
                raise
        if filling.left:
            (slot, *_) = filling.left
            raise mismatch("nothing more", described(slot, slot.layer))
        for kept in lasting:
            kept.settle()
        for value in compared:
            value.compare()

    @uncompiled
    def _drop(self, tensor: Tensor) -> Slot:
        # What is empty takes no memory. The caller's hooks, if any, keep the inputs.
        own, base = id(tensor), id(tensor._base)
        if (
            # guard: keeping what lasts
            own in self.lasting
            or base in self.lasting
            or own in self.inputs
            or base in self.inputs
            or not tensor.numel()
        ):
            slot: Slot = Lasting(tensor)
        else:
            slot = dropped(tensor)
        self.slots.append(slot)
        return slot

    @uncompiled
    def _unpack(self, slot: Slot) -> Tensor:
        if slot.tensor is None:
            # The gradient came another way than through the output.
            self.recompute()
        tensor = slot.tensor
        if tensor is None:
            raise _not_within_forward()
        # guard: versions of what is kept
        if tensor._version != slot.version:
            raise slot.modified()
        return tensor


class Recompute(torch.autograd.Function):
    """A fork that recomputes in backward: ``checkpoint, *tensors → *tensors, phony``."""

    @staticmethod
    def forward(ctx: Any, checkpoint: Checkpoint, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.checkpoint = checkpoint
        phony = get_phony(tensors[0].device, requires_grad=False).detach()
        return (*pass_on(ctx, tensors), phony)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.checkpoint.recompute()
        return (None, *grads[:-1])


def checkpoint(function: Callable[[Any], Any], input: Any) -> Any:
    """Runs a function without keeping what it saves for backward, which recomputes it.

    Args:
        function: takes and gives any nested structure of tensors.
        input: its input, with a tensor at least, all on the device where the function computes.

    Returns:
        The output of the function.
    """
    batch = Batch(input)
    if not torch.is_grad_enabled():
        return function(input)
    checkpointed = Checkpoint(
        lambda batch: batch.call(function),
        Context(),
        current_stream(batch[0].device),
        nullcontext(),
    )
    output = checkpointed.forward(batch)
    return output.value


def _not_within_forward() -> RuntimeError:
    return RuntimeError(
        "under checkpointing, a layer cannot run backward within its own forward, nor can backward "
        "go on after a recomputation has failed; use checkpoint='never' for such a layer, or run "
        "the forward again"
    )


def _hooks_of_caller() -> Hooks | None:
    """Those for saved tensors, if it is not the checkpointing of a cell around this one."""
    hooks = current_hooks()
    if hooks is None or hooks[1] is _not_saved:
        return None
    return None if isinstance(getattr(hooks[1], "__self__", None), Checkpoint) else hooks


def _not_saved(_: None) -> Tensor:
    raise RuntimeError("a layer cannot run backward within its own forward under checkpointing")
