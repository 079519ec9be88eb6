"""The two runs of a checkpointed cell: what the second one is given, and how both are compared."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import Hooks, Swap, registered
from torchgpipe.ambient.notes import layer as current
from torchgpipe.autograd.fork_join import Unpack, get_phony
from torchgpipe.autograd.versions import version_of
from torchgpipe.recompute.slots import Slot, described, mismatch, modified
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import map_leaves

__all__ = ["is_checkpointing", "is_recomputing", "keep", "verify_recomputation"]


class Phase(threading.local):
    """The run of a checkpointed cell that a thread is in."""

    #: Whether tensors that layers save for backward are dropped, to be computed again.
    checkpointing = False
    #: Whether layers run for the second time, within backward.
    recomputing = False
    #: Where keep() puts values for the recomputation, which takes them; None if there will be none.
    values: Any = None


phase = registered(Phase())


@uncompiled
def is_checkpointing() -> bool:
    """Whether this thread runs a layer whose saved tensors are dropped, to be recomputed."""
    return phase.checkpointing


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
    return phase.recomputing


def checkpointing(values: Any = None) -> Swap:
    """Context manager for the first run of a checkpointed cell."""
    return Swap(phase, checkpointing=True, values=values)


def recomputing(values: Any = None) -> Swap:
    """Context manager for the recomputation of a checkpointed cell."""
    return Swap(phase, recomputing=True, values=values)


# The input of a checkpointed cell, which a step keeps for the recomputation.
#
# The caller's own hooks for saved tensors see this input, as if autograd had saved it, and may put
# it somewhere else. They do not see tensors that a recomputation computes again.


class StoredInput:
    """The input of a cell, as it was before the cell was computed."""

    __slots__ = ("_batch", "_changed_by", "_packed", "_tensors", "_versions", "hooks")

    def __init__(self, batch: Batch, hooks: Hooks | None) -> None:
        self.hooks = hooks
        self._batch = batch
        self._tensors = [*batch]
        self._versions = [*map(version_of, self._tensors)]
        #: The name and the class of the layer that changed the input in place; None if none did.
        self._changed_by: tuple[str | None, str | None] | None = None
        #: For each input tensor: what the caller's pack hook returned; the tensor's requires_grad.
        self._packed: Sequence[tuple[Any, bool]] = ()

    @property
    def unchanged(self) -> bool:
        """Whether the tensors still have their first versions.

        After :meth:`pack` has handed them to hooks, this compares placeholders.
        """
        return self._versions == [*map(version_of, self._tensors)]

    @uncompiled
    def look(self) -> None:
        """Take note of the layer that has just run, if it changed the input in place."""
        # The property `unchanged` spelt out: look() runs after each layer, and a call takes time.
        if self._changed_by is None and self._versions != [*map(version_of, self._tensors)]:
            self._changed_by = current.name, current.kind

    def verify(self) -> None:
        """Check, after the first run, that the layers have left the input as it was.

        Raises:
            RuntimeError: a layer changed the input in place.
        """
        if self.unchanged:
            return
        if self._changed_by is not None:
            # The note on the error names the current layer, so the layer at fault is made current.
            current.name, current.kind = self._changed_by
        layer = f" (layer: {current.name})" if current.name else ""
        raise RuntimeError(
            "under checkpointing, a partition must not change its input in place, nor what it "
            f"pops, since it is computed again from these{layer}; have the layer "
            "compute out of place, or clone the tensor there"
        )

    def pack(self) -> None:
        """Hand the tensors to the caller's hooks, if there are any."""
        if self.hooks is None:
            return
        pack, _ = self.hooks
        with torch.no_grad():
            self._packed = [(pack(x.detach()), x.requires_grad) for x in self._batch]
        self._tensors = [torch.empty(0, device="meta") for _ in self._packed]
        self._batch = self._batch.replace(self._tensors)
        self._versions = [*map(version_of, self._tensors)]

    def unpack(self) -> Batch:
        """Return the input once more, without what it was computed from.

        Raises:
            RuntimeError: it was changed in place since.
            TypeError: the caller's hook returned something else than a tensor.
        """
        if not self.unchanged:
            raise RuntimeError(
                "under checkpointing, the input of a partition must not be changed in place "
                "between a forward and its backward, which computes the forward again "
                f"(versions: {[version_of(x) for x in self._tensors]}, expected versions: "
                f"{self._versions}); change a clone of it, or change it after backward"
            )
        if self.hooks is None:
            return self._again([(x, x.requires_grad) for x in self._batch])
        _, unpack = self.hooks
        again = []
        for packed, needs_grad in self._packed:
            tensor = unpack(packed)
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    "a hook that unpacks what was saved for backward must return a tensor "
                    f"(returned: {type(tensor).__name__}); return what the pack hook was given"
                )
            again.append((tensor, needs_grad))
        return self._again(again)

    def _again(self, tensors: Sequence[tuple[Tensor, bool]]) -> Batch:
        needing = [x for x, needs_grad in tensors if needs_grad]
        if not needing or len(self._batch.parts) == 1:
            # Leaves take less time than Unpack, but the graph holds them until all layers have run.
            # Without skips that is no loss: callers of the layers hold the input as long anyway.
            return self._batch.replace([x.detach().requires_grad_(need) for x, need in tensors])
        phony = get_phony(needing[0].device, requires_grad=True)
        with torch.enable_grad():
            unpacked = iter(Unpack.apply(phony, *needing))
        # guard: no leaves
        return self._batch.replace([next(unpacked) if need else x.detach() for x, need in tensors])


# Values that layers pass to keep(): the recomputation gets those of the first run.
#
# A recomputation has the first run's random numbers, modes and buffers. But some operators of
# accelerators add in another order each time, and may break a tie the other way. A router that
# sends rows to experts would send other rows then, and the gradients would be of another function.


Value = TypeVar("Value")


class Values(list[tuple[Any, int]]):
    """The leaves of values that layers of one cell have kept, in order, each with its version.

    The version counts for tensors. Each checkpointed cell has such a list, and few fill it.
    """

    __slots__ = ()

    def put(self, leaf: Any) -> Any:
        """Keep a leaf of the first run, and return it."""
        if isinstance(leaf, Tensor):
            # guard: kept values without their graph
            self.append((leaf.detach(), version_of(leaf)))
        else:
            self.append((leaf, 0))
        return leaf

    def take(self, leaf: Any) -> Any:
        """Return the leaf that the first run has kept, in place of the recomputed one.

        Raises:
            RuntimeError: the recomputation keeps another kind of value, or more of them; or the
                kept one was changed in place since.
        """
        if not self:
            raise mismatch("a further value that is kept", "nothing more")
        first, version = self.pop(0)
        if not isinstance(leaf, Tensor):
            return first
        if not isinstance(first, Tensor) or (first.shape, first.dtype) != (leaf.shape, leaf.dtype):
            kept = described(first, None) if isinstance(first, Tensor) else type(first).__name__
            raise mismatch(described(leaf, None), kept)
        # guard: versions of kept values
        if version_of(first) != version:
            raise modified(first, version, None)
        if not leaf.requires_grad:
            return first
        # Unpack gives the value a graph, as it had in the first run: operators then save the same.
        with torch.enable_grad():
            (again,) = Unpack.apply(get_phony(first.device, requires_grad=True), first)
        return again


@uncompiled
def keep(value: Value) -> Value:
    """Keep a value for the recomputation of a checkpointed cell; a layer calls this in its forward.

    ::

        def forward(self, x):
            scores = self.router(x)
            experts = keep(scores.topk(2).indices)
            weights = scores.gather(-1, experts)
            ...

    What the first run has computed is what the recomputation gets, even if it computes something
    else.
    So compute with what is returned: the operators before save what the recomputation computes, as
    ``topk`` does for the gradient of its values. The layers must keep as many values in both runs,
    in the same order. A kept value takes memory until its cell is computed again.

    Where nothing is computed again, the value is returned as it is. That is also so within a
    checkpoint of PyTorch, whose recomputations are its own.

    Args:
        value: any nested structure of tensors and other objects.

    Returns:
        The value, or that of the first run.
    """
    values = phase.values
    if values is None:
        return value
    kept: Value = map_leaves(values.take if phase.recomputing else values.put, value)
    return kept


# Verification: what a recomputation saves for backward is compared with what the forward saved.
#
# Some kernels save memory to which they write only in part, as ``ctc_loss`` does. Backward does not
# read the rest, which is different in each run. To make it equal, PyTorch fills all new memory with
# NaN, and integers with their maximum. PyTorch does that only in its deterministic mode, which is
# one for the whole process.


#: What each open block of :class:`verify_recomputation` restores: deterministic mode, its
#: ``warn_only``, its ``fill_uninitialized_memory``, and the filters of warnings.
_verifications: list[tuple[bool, bool, bool, warnings.catch_warnings[Any]]] = []

#: Typed as Any, since PyTorch's stubs lack the attribute ``fill_uninitialized_memory``.
settings: Any = torch.utils.deterministic


class verify_recomputation(ContextDecorator):
    """Compare the values that a recomputation saves for backward with those of the forward.

    That finds layers that do not compute the same from the same input::

        with verify_recomputation():
            model(input).sum().backward()

    The block applies to forwards that run within it, and takes the memory that checkpointing saves.
    Run backward within it, too: PyTorch is in its deterministic mode there, with warnings of that
    mode ignored. Without the block, a recomputation compares only the number, shapes and dtypes of
    saved tensors.
    """

    def __enter__(self) -> None:
        catching = warnings.catch_warnings()
        is_on = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        _verifications.append((is_on, warn_only, settings.fill_uninitialized_memory, catching))
        catching.__enter__()
        # Hide the warnings of warn_only=True: operators that cannot be deterministic may run.
        warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
        warnings.filterwarnings("ignore", "Deterministic behavior was enabled")
        if not is_on:
            torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        is_on, warn_only, settings.fill_uninitialized_memory, catching = _verifications.pop()
        torch.use_deterministic_algorithms(is_on, warn_only=warn_only)
        catching.__exit__(None, None, None)


def is_verifying() -> bool:
    """Whether recomputations of what is computed now will be compared."""
    return bool(_verifications)


class Compared(Slot):
    """A slot whose recomputed value is compared with the forward's."""

    __slots__ = ("expected", "kind")

    def __init__(self, tensor: Tensor, shapes: dict[torch.Size, torch.Size]) -> None:
        super().__init__(tensor, shapes)
        self.kind = current.kind
        self.expected: Tensor | None = tensor.detach()

    def close(self) -> None:
        """Take note of the value when the layers have run, since only then all of it is written."""
        assert self.expected is not None
        self.expected = self.expected.clone()

    def compare(self) -> None:
        """Compare the recomputed value with the forward's.

        Raises:
            RuntimeError: they differ.
        """
        expected, self.expected = self.expected, None
        try:
            torch.testing.assert_close(self.tensor, expected, equal_nan=True)
        except AssertionError as error:
            # The note on the error must name the layer that saved the tensor, which ran long ago.
            current.name, current.kind = self.layer, self.kind
            raise RuntimeError(
                "a recomputation must compute the same values as the forward "
                f"(layer: {self.layer}, shape: {tuple(self.shape)}); make the layer compute the "
                f"same from the same input whenever it runs\n{error}"
            ) from None


def dropped(tensor: Tensor, shapes: dict[torch.Size, torch.Size]) -> Slot:
    """A slot for a tensor that is dropped, which compares it with the recomputed one.

    Two kinds are not compared: tensors of bytes, since they may be the workspace of a kernel, as an
    LSTM's, some of which the kernel never writes; and those of MKL-DNN, which no operator compares.
    """
    kind = Slot if tensor.dtype == torch.uint8 or tensor.is_mkldnn else Compared
    return kind(tensor, shapes)
