"""Checkpointing: tensors that a cell saves for backward are dropped, and recomputed when due.

The cell runs once, as always, and autograd records it as always. But each tensor that the cell
saves for backward is exchanged for an empty :class:`Slot`, unless the tensor exists anyway, as
weights and the cell's input do. In backward, before the gradient of the micro-batch arrives,
:class:`Recompute` runs the cell a second time, and the tensors that this run saves fill the slots
in the same order. The recomputation ends with the last tensor that was dropped, if only weights
come after it, and its graph is thrown away. Where nothing was dropped, there is no recomputation.

So there is one graph, the cell's own: parameters receive their gradients from it once,
``torch.autograd.grad`` and double backward see what they see without checkpointing, and so do hooks
on tensors that layers keep. The obvious way, a backward of the second graph within an autograd
function, costs the host less, and breaks some of this: see ``docs/decisions/real_graph.rst``.

::

    forward:   input ── layers ── Recompute ── output
                 │        ○ ○ _drop                      ○ an empty slot, one of `places`
                 └─── stored ───────┐
                                    ↓
    backward:  input ←─ layers ←─ Recompute ←─ gradient
                 unpack   ● ●       │ recompute, _again
                           ↑        │
                           └─ layers, again: _fill

:meth:`Checkpoint.recompute` is called by the node, or by ``unpack`` of a slot that is empty still.
It does nothing the second time. ``_again`` brings back the first run's stream, modes and input;
``_fill`` runs the cell there, and has each tensor that it saves put into the next of ``places``.
:meth:`Checkpoint.compute` goes through ``_again`` too, for what the cell returns.

:class:`Recompute` passes the gradient on. Where the gradient comes from another device, the node
belongs to the copy stream on which the gradient arrives, but recomputes on the compute stream. So
the compute stream does not wait for the gradient; only the host has to know that the gradient is on
its way. Where the output stays on the device, there is nothing to wait for, and recomputing when
the first slot is asked for is early enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import Context, Hooks, SavedSettings, Swap, current_hooks
from torchgpipe.ambient.generators import holding
from torchgpipe.ambient.modes import is_within_autocast, own_casts
from torchgpipe.ambient.notes import after_layer
from torchgpipe.ambient.random_numbers import CellNumbers, FirstNumbers
from torchgpipe.autograd.fork_join import Recompute, fork, needs_backward
from torchgpipe.devices.streams import (
    AbstractStream,
    CPUStream,
    current_stream,
    get_device,
    has_streams,
    is_current,
    record_stream,
    use_stream,
    wait_stream,
)
from torchgpipe.recompute.runs import (
    Compared,
    StoredInput,
    Values,
    checkpointing,
    dropped,
    is_verifying,
    recomputing,
)
from torchgpipe.recompute.slots import Enough, Filling, Kept, Saved, Slot, explain_hooks, modified
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []

_base = attrgetter("_base")


class Checkpoint:
    """One run of a function that can be repeated to obtain the tensors it saved for backward.

    Args:
        function: the function; a recomputation on the same input must save the same tensors.
        context: the modes of the caller, for both runs.
        stream: the stream on which the function computes, for both runs.
        within: a context manager to recompute in.
        lasting: tensors that exist anyway, as weights do, or aliases of these, by the identities of
            the tensors. They, and views of them, are neither dropped nor recomputed.
        whole: whether a recomputation always goes to its end.
        shapes: the shapes of what other checkpoints have dropped, to which this one adds its own.
    """

    def __init__(
        self,
        function: Callable[[Batch], Batch],
        context: Context,
        stream: AbstractStream,
        within: AbstractContextManager[None],
        lasting: Mapping[int, Tensor],
        whole: bool,
        shapes: dict[torch.Size, torch.Size],
    ) -> None:
        self.function, self.context = function, context
        self.stream, self.within = stream, within
        self.lasting, self.whole = lasting, whole
        #: For each tensor that the first run saves, in order: its slot, or itself if it is kept.
        self.places: list[Saved] = []
        #: The saved tensors that are not dropped, since they exist anyway, as weights do.
        self.kept = Kept()
        #: The values that layers pass to keep() in the first run, which the recomputation takes.
        self.values = Values()
        #: Makes a dropped tensor's slot, which compares values if verify_recomputation() is on.
        self.dropped: Callable[[Tensor, dict[torch.Size, torch.Size]], Slot] = Slot
        self.shapes = shapes
        #: During the first run, the ids of the input's tensors and of their bases, which _drop()
        #: keeps. Empty afterwards, since a new tensor may get the id of a freed tensor.
        self.inputs: set[int] = set()
        #: The input and the RNG states of the first run; None if no recomputation will take them.
        self.stored: tuple[StoredInput, FirstNumbers] | None = None
        self.lock = threading.RLock()
        #: Whether layers saved tensors on side streams, so that unpack() has those streams wait for
        #: `stream`; None on the CPU, which has no streams.
        self.has_side_streams = None if isinstance(stream, CPUStream) else False

    def forward(
        self,
        batch: Batch,
        original: Batch | None = None,
        *,
        cell: CellNumbers | None = None,
        goes_on: bool = False,
    ) -> Batch:
        """Run the function, and save nothing but its input.

        Args:
            batch: the input of the recomputation, and of this run unless there is an original.
            original: the input of this run, if layers may change it; ``batch`` has clones then.
            cell: the random numbers of the cell, if it is nothing but this run.
            goes_on: whether the caller adds to the function and calls :meth:`end_forward`.

        Raises:
            RuntimeError: the function changed its input in place.
        """
        # guard: what is kept is packed
        stored = StoredInput(batch, _hooks_of_caller())
        if stored.hooks is None:
            self.inputs = {id(x) for x in [*batch, *map(_base, batch)] if x is not None}
        numbers = FirstNumbers(get_device(self.stream), cell)
        if is_verifying():
            self.dropped = dropped
        hooks = saved_tensors_hooks(self._drop, self.unpack)
        try:
            with Swap(after_layer, then=stored.look), checkpointing(self.values), hooks:
                output = self.function((batch if original is None else original).copy())
        except RuntimeError as error:
            explain_hooks(error)
            raise
        stored.verify()
        self.inputs.clear()
        for slot in self._compared(self.places):
            slot.close()
        if goes_on or self._has_dropped():
            # Here the cell gets its last RNG state, so that it need not read the state at its end.
            # With hooks it must: the hooks that pack() calls may draw random numbers.
            numbers.end_first_run(cell if stored.hooks is None else None)
            stored.pack()
            self.stored = stored, numbers
        else:
            self._forget()
        return output

    def _has_dropped(self) -> bool:
        return len(self.kept.tensors) != len(self.places)

    def end_forward(self) -> None:
        """Let go of everything if nothing was dropped, so that there will be no recomputation."""
        if not self._has_dropped():
            self._forget()

    def _forget(self) -> None:
        self.places, self.stored = [], None
        self.kept.let_go()
        del self.function, self.lasting, self.context, self.values

    def recompute(self) -> None:
        """Fill the slots, unless that was done, and let go of the input.

        Raises:
            RuntimeError: the input was changed in place since, or the function saves other tensors
                than in its first run.
        """
        # On the CPU, several threads may run backward through one graph. Only the first recomputes.
        with self.lock:
            if self.stored is None:
                return
            if not self.context.over:
                raise _not_within_forward()
            # Emptying the list lets autograd free a recomputed tensor as soon as its node has run.
            # guard: letting go of slots
            places, self.places = self.places, []
            try:
                if has_streams(get_device(self.stream)) and _torch.is_multithreading_enabled():
                    # Autograd's thread may have another number of CPU threads, with which sums on
                    # the CPU are rounded differently.
                    self.context.use_callers_threads()
                self._again(partial(self._fill, places), let_go=True)
            except BaseException:
                # Some slots may hold wrong tensors, which another backward must not use.
                for saved in places:
                    if isinstance(saved, Slot):
                        saved.empty()
                raise
            finally:
                self.kept.let_go()
                # Free these now: autograd's graph holds this object, and hooks may hold the graph.
                del self.function, self.lasting, self.context, self.values

    def compute(self) -> Batch:
        """Run the function once more for what it returns, and keep the input."""
        output: list[Batch] = []

        def run(numbers: FirstNumbers, again: Batch) -> None:
            with numbers.restored(), recomputing(Values(self.values)):
                output.append(self.context.run(self.function, again))

        self._again(run, let_go=False)
        return output[0]

    def _again(self, run: Callable[[FirstNumbers, Batch], None], *, let_go: bool) -> None:
        """Recompute the cell on its stream, in the modes and with the input of its first run."""
        assert self.stored is not None
        device = get_device(self.stream)
        settings = SavedSettings([device], self.context.modes)
        within = is_within_autocast(settings.modes)
        # guard: stream of recomputation
        with settings, use_stream(self.stream), self.within:
            # guard: letting go of what was kept
            (stored, numbers), self.stored = self.stored, None if let_go else self.stored
            # unpack() comes before the forward's modes are entered, since autograd, too, calls the
            # caller's unpack hook in the modes of backward.
            again = stored.unpack()
            # Deleting `stored` lets skips of the input be freed as soon as layers have popped them.
            del stored
            with self.context.entered(settings), own_casts() if within else nullcontext():
                holding(numbers.locks, partial(run, numbers, again))

    def _fill(self, places: Sequence[Saved], numbers: FirstNumbers, again: Batch) -> None:
        # The run ends early, by Enough, only if layers save kept tensors, such as weights, after
        # the last dropped one: otherwise raising Enough takes longer than running on. If random
        # numbers or values of both runs are compared, the run goes to its end, too.
        compared = self._compared(places)
        # guard: to the end for hooks
        whole = self.whole or numbers.drawn or bool(compared)
        filling = Filling(places, self.kept, whole or isinstance(places[-1], Slot))
        hooks = saved_tensors_hooks(filling.next, _not_saved)
        try:
            # guard: random numbers
            with numbers.restored(), recomputing(self.values), hooks:
                # guard: context variables
                self.context.run(self.function, again)
        except Enough:
            pass
        except Exception:
            # If all slots are full, a layer has turned Enough into this error, and nothing failed.
            if filling.whole or filling.missing:
                raise
        filling.verify_complete()
        for value in compared:
            value.compare()

    def _compared(self, places: Sequence[Saved]) -> list[Compared]:
        if self.dropped is Slot:
            return []
        return [saved for saved in places if isinstance(saved, Compared)]

    @uncompiled
    def _drop(self, tensor: Tensor) -> Saved:
        if self.has_side_streams is False and not is_current(self.stream):
            # At its end this layer will have the compute stream wait for its side stream. So a
            # recomputation must not end within the layer, but goes to its own end.
            # guard: to the end for other streams
            self.has_side_streams = self.whole = True
        key = id(tensor)
        saved: Saved
        # guard: keeping what lasts
        lasting = self.lasting.get(key)
        if lasting is not None:
            saved = self.kept.add(lasting)
        elif (
            key in self.inputs
            or (
                (base := tensor._base) is not None
                and (id(base) in self.lasting or id(base) in self.inputs)
            )
            # To drop an empty tensor would free no memory.
            or not tensor.numel()
            # A recomputed jagged tensor would have a new symbolic size (j2), but its gradient j1.
            # guard: lengths of jagged tensors
            or tensor.is_nested
        ):
            # Detached: a tensor and its graph would hold each other. Even a leaf may get a graph.
            # guard: kept without its graph
            saved = self.kept.add(tensor.detach())
        else:
            saved = self.dropped(tensor, self.shapes)
        self.places.append(saved)
        return saved

    @uncompiled
    def unpack(self, saved: Saved) -> Tensor:
        """Return what a layer has saved, in backward."""
        if not isinstance(saved, Slot):
            # guard: versions of what is kept
            if saved._version != self.kept.versions[id(saved)]:
                with self.within:
                    raise self.kept.modified(saved)
            return saved
        if saved.tensor is None:
            # The gradient came through an output that has no Recompute node to call recompute().
            self.recompute()
        tensor = saved.tensor
        if tensor is None:
            raise _not_within_forward()
        if tensor._version != saved.version:
            with self.within:
                raise modified(tensor, saved.version, saved.layer)
        if self.has_side_streams and not is_current(self.stream):
            # Autograd runs on a layer's side stream. Waiting for the compute stream is enough: in
            # the recomputation, layers had it wait for all of their side streams.
            side_stream = current_stream(tensor.device)
            # guard: recomputed beside
            wait_stream(side_stream, self.stream)
            # guard: memory of what was recomputed beside
            record_stream(tensor, side_stream)
        return tensor


def trigger(
    checkpoints: Iterable[Checkpoint], outputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Branch a phony off outputs whose gradients trigger recomputations, if there are any.

    The node belongs to the current stream. Outputs that do not pass through here trigger the
    recomputation when backward asks for the first slot.
    """
    # guard: no Recompute for nothing
    due = [checkpoint.recompute for checkpoint in checkpoints if checkpoint.stored is not None]
    if not (due and needs_backward(outputs)):
        return fork(outputs)
    *tensors, phony = Recompute.apply(due, *outputs)
    return tuple(tensors), phony


def _not_within_forward() -> RuntimeError:
    return RuntimeError(
        "under checkpointing, a layer cannot run backward within its own forward, nor can backward "
        "go on after a recomputation has failed; use checkpoint='never' for such a layer, or run "
        "the forward again"
    )


def _hooks_of_caller() -> Hooks | None:
    """The hooks for saved tensors, unless they are those of the checkpoint of a cell around."""
    hooks = current_hooks()
    if hooks is None or hooks[1] is _not_saved:
        return None
    return None if isinstance(getattr(hooks[1], "__self__", None), Checkpoint) else hooks


def _not_saved(_: None) -> Tensor:
    raise RuntimeError("a layer cannot run backward within its own forward under checkpointing")
