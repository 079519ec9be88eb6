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
        #: The places of what the first run saves, in order.
        self.places: list[Saved] = []
        #: The tensors among them that exist anyway.
        self.kept = Kept()
        #: The values that layers keep of the first run.
        self.values = Values()
        #: How a slot is made for a tensor that is dropped.
        self.dropped: Callable[[Tensor, dict[torch.Size, torch.Size]], Slot] = Slot
        self.shapes = shapes
        #: The identities of the input's tensors, while no other tensor can have them.
        self.inputs: set[int] = set()
        #: The input and the RNG states of the first run, as long as there may be another one.
        self.stored: tuple[StoredInput, FirstNumbers] | None = None
        self.lock = threading.RLock()
        #: Whether layers have saved tensors on streams of their own; None without streams.
        self.has_side_streams = None if isinstance(stream, CPUStream) else False

    def forward(
        self,
        batch: Batch,
        given: Batch | None = None,
        *,
        cell: CellNumbers | None = None,
        goes_on: bool = False,
    ) -> Batch:
        """Run the function, and save nothing but its input.

        Args:
            batch: the input.
            given: what this run computes, if it changes that in place, and the input is a clone.
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
                output = self.function((batch if given is None else given).copy())
        except RuntimeError as error:
            explain_hooks(error)
            raise
        stored.verify()
        self.inputs.clear()
        for slot in self._compared(self.places):
            slot.close()
        if goes_on or self._has_dropped():
            # The caller's hooks may draw, too.
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
        # Several threads may run backward through one graph on the CPU.
        with self.lock:
            if self.stored is None:
                return
            if not self.context.over:
                raise _not_within_forward()
            # From here on only the node that saved a tensor holds its slot.
            # guard: letting go of slots
            places, self.places = self.places, []
            try:
                if has_streams(get_device(self.stream)) and _torch.is_multithreading_enabled():
                    # This is a thread of autograd's own.
                    self.context.use_callers_threads()
                self._again(partial(self._fill, places), let_go=True)
            except BaseException:
                # Some slots may hold wrong tensors, which another backward must not use.
                for place in places:
                    if isinstance(place, Slot):
                        place.empty()
                raise
            finally:
                self.kept.let_go()
                # The graph lives on, and layers or hooks may refer to it.
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
        found = SavedSettings([device], self.context.modes)
        within = is_within_autocast(found.modes)
        # guard: stream of recomputation
        with found, use_stream(self.stream), self.within:
            # guard: letting go of what was kept
            (stored, numbers), self.stored = self.stored, None if let_go else self.stored
            # Unpack in the modes of backward, as autograd does where it calls the caller's hooks.
            # From here on the recomputation alone holds the memory of the input.
            again = stored.unpack()
            del stored
            with self.context.entered(found), own_casts() if within else nullcontext():
                holding(numbers.locks, partial(run, numbers, again))

    def _fill(self, places: Sequence[Saved], numbers: FirstNumbers, again: Batch) -> None:
        # Layers after the last dropped tensor need not run again, unless all that the first run
        # did has to be compared. The run is cut short only where that spares computing with
        # weights, since raising an exception takes time, too.
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
            # If all slots are full, the error came after Enough and was caused by it.
            if filling.whole or filling.missing:
                raise
        filling.verify_complete()
        for value in compared:
            value.compare()

    def _compared(self, places: Sequence[Saved]) -> list[Compared]:
        if self.dropped is Slot:
            return []
        return [place for place in places if isinstance(place, Compared)]

    @uncompiled
    def _drop(self, tensor: Tensor) -> Saved:
        if self.has_side_streams is False and not is_current(self.stream):
            # A recomputation that ended there would not come back to the compute stream.
            # guard: to the end for other streams
            self.has_side_streams = self.whole = True
        own = id(tensor)
        place: Saved
        # guard: keeping what lasts
        lasting = self.lasting.get(own)
        if lasting is not None:
            place = self.kept.add(lasting)
        elif (
            own in self.inputs
            or (
                (base := tensor._base) is not None
                and (id(base) in self.lasting or id(base) in self.inputs)
            )
            # An empty tensor takes no memory. The caller's hooks, if any, have the inputs.
            or not tensor.numel()
            # The lengths of a jagged tensor are its own: no other fits the gradient that comes.
            # guard: lengths of jagged tensors
            or tensor.is_nested
        ):
            # Detached: a tensor with its graph may be kept alive by that graph, and a leaf may get
            # one.
            # guard: kept without its graph
            place = self.kept.add(tensor.detach())
        else:
            place = self.dropped(tensor, self.shapes)
        self.places.append(place)
        return place

    @uncompiled
    def unpack(self, place: Saved) -> Tensor:
        """Return what a layer has saved, in backward."""
        if not isinstance(place, Slot):
            # guard: versions of what is kept
            if place._version != self.kept.versions[id(place)]:
                with self.within:
                    raise self.kept.modified(place)
            return place
        if place.tensor is None:
            # The gradient came another way than through an output that trigger() has seen.
            self.recompute()
        tensor = place.tensor
        if tensor is None:
            raise _not_within_forward()
        if tensor._version != place.version:
            with self.within:
                raise modified(tensor, place.version, place.layer)
        if self.has_side_streams and not is_current(self.stream):
            # The node belongs to the stream of the first run, and this memory to others.
            own = current_stream(tensor.device)
            # guard: recomputed beside
            wait_stream(own, self.stream)
            # guard: memory of what was recomputed beside
            record_stream(tensor, own)
        return tensor


def trigger(
    checkpoints: Iterable[Checkpoint], outputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Branch a phony off outputs whose gradients trigger recomputations, if there are any.

    The node belongs to the current stream. Outputs that do not pass through here trigger the
    recomputation when backward asks for the first slot.
    """
    # guard: no Recompute for nothing
    due = [found.recompute for found in checkpoints if found.stored is not None]
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
