"""Slots: the places of saved tensors that were dropped, what fills them, and what need not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchgpipe import _torch
from torchgpipe._torch.dynamo import has_compiled, uncompiled
from torchgpipe.ambient.notes import layer as current

__all__: list[str] = []


class Slot:
    """The place of a saved tensor that was dropped, empty until the tensor is recomputed.

    Each tensor that a layer saves has a slot, which is most of the host time of checkpointing. So
    this class does nothing that can be done elsewhere.
    """

    __slots__ = ("dtype", "layer", "shape", "tensor", "version")

    tensor: Tensor | None
    version: int

    def __init__(self, tensor: Tensor, shapes: dict[torch.Size, torch.Size]) -> None:
        self.tensor = None
        shape = tensor.shape
        # Slots share one object for equal shapes: each further object slows garbage collection.
        self.shape = shapes.setdefault(shape, shape)
        self.dtype = tensor.dtype
        self.layer = current.name

    def fill(self, tensor: Tensor) -> None:
        """Put the recomputed tensor here.

        Raises:
            RuntimeError: it is not like the tensor that was saved in forward.
        """
        # The checks of verify_like() spelt out, since a call for each tensor takes time.
        if (
            tensor.shape != self.shape
            or tensor.dtype is not self.dtype
            or current.name != self.layer
        ):
            verify_like(tensor, self, self.layer)
        # Detached, to free the recomputed graph. The version still counts changes of `tensor`.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def empty(self) -> None:
        self.tensor = None


def verify_like(tensor: Tensor, saved: Tensor | Slot, by: str | None) -> None:
    """Check that a tensor has the shape and dtype of the one that was saved in forward.

    Raises:
        RuntimeError: its shape or dtype differs, or another layer saves it.
    """
    layer = current.name
    # A layer that checkpoints others itself runs them in backward, where current.name is None. Then
    # layers are not compared.
    other = layer is not None and layer != by
    if other or _shape(tensor) != _shape(saved) or tensor.dtype != saved.dtype:
        raise mismatch(described(tensor, layer), described(saved, by))


def described(saved: Tensor | Slot, layer: str | None) -> str:
    by = f" by layer {layer}" if layer else ""
    return f"shape {_shape(saved)} of {saved.dtype}{by}"


def _shape(saved: Tensor | Slot) -> tuple[int, ...] | str:
    # Nested tensors count as alike: strided ones have no shape, and jagged ones each their own.
    nested = isinstance(saved, Tensor) and saved.is_nested
    return "nested" if nested else tuple(saved.shape)


def mismatch(actual: str, expected: str) -> RuntimeError:
    """The error for a recomputation that saves other tensors than the forward."""
    compiled = ""
    if has_compiled():
        compiled = (
            ". Behind the limit of graphs torch.compile leaves one of them to Python: set "
            "torch._dynamo.config.recompile_limit to 8 for each device, or more where shapes "
            "differ, before the first step, or compile with dynamic=True"
        )
    return RuntimeError(
        "a recomputation must save the same tensors for backward as the forward "
        f"(recomputation: {actual}, forward: {expected}); make the layers compute the same from "
        f"the same input whenever they run (is_recomputing() tells the recomputation){compiled}"
    )


def modified(tensor: Tensor, expected: int, layer: str | None) -> RuntimeError:
    """The error for a tensor that was changed in place, in autograd's words."""
    # Modules that a device map places have no layer's name. The note on the error names them.
    by = f"saved by layer: {layer}, " if layer else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation ({by}shape: {tuple(tensor.shape)}, version: {tensor._version}, "
        f"expected version: {expected}); use the layer that changes it out of place"
    )


def explain_hooks(error: RuntimeError) -> None:
    """Put PyTorch's error about layers that cannot run with saved-tensor hooks into our words.

    Raises:
        RuntimeError: it is this error.
    """
    if "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "a partition whose layers call torch.func.grad, vjp, jacrev or hessian must keep what "
            "these save, since they take no hooks for saved tensors "
            f"(PyTorch: {error}); use checkpoint='never' for the partition"
        ) from error


# Tensors that layers save for backward and that exist anyway: weights, buffers and the input.
#
# They are neither dropped nor recomputed: the list of slots has the tensor itself. Its version when
# a layer saved it is in a dict, to notice a change in place, after which gradients would be wrong.
# An object for each tensor would take time, and more in Python's garbage collector.


_NONE: frozenset[int] = frozenset()


class Kept:
    """The tensors that the layers of one cell save, and that exist anyway."""

    __slots__ = ("_several", "layers", "tensors", "versions")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        #: For each tensor's id, its version when a layer first saved it; any other is an error.
        self.versions: dict[int, int] = {}
        #: For each tensor's id, the name of the first layer that saved it; None if unknown.
        self.layers: dict[int, str | None] = {}
        #: The ids of tensors that several layers saved: verify_like() accepts them of any layer.
        self._several = _NONE

    def add(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that a layer saves; return what autograd shall hold instead."""
        # Both dicts have one int object as key, to save memory: a pipeline keeps many tensors.
        key = id(tensor)
        self.versions.setdefault(key, tensor._version)
        if self.layers.setdefault(key, current.name) != current.name:
            self._several |= {key}
        self.tensors.append(tensor)
        return tensor

    def verify_like(self, kept: Tensor, tensor: Tensor) -> None:
        """Check that a tensor that a recomputation saves is like the one that is kept.

        Raises:
            RuntimeError: it is not.
        """
        by = current.name if id(kept) in self._several else self.layers[id(kept)]
        verify_like(tensor, kept, by)

    def let_go(self) -> None:
        """Let go of the tensors; only autograd holds them from here on."""
        self.tensors.clear()

    def modified(self, tensor: Tensor) -> RuntimeError:
        """The error for a tensor that was changed in place since a layer saved it."""
        return modified(tensor, self.versions[id(tensor)], self.layers[id(tensor)])


#: What autograd holds of a saved tensor: its slot if it is dropped, else the tensor itself.
Saved: TypeAlias = Slot | Tensor


class Enough(BaseException):
    """The end of a recomputation that has filled all slots with tensors that are complete.

    It is a BaseException, since layers may catch errors. Forward hooks do not run after it.
    """


class Filling:
    """Hook for saved tensors that fills slots with what a recomputation saves.

    An operator may hand a tensor to autograd before it writes to the tensor, as ``rrelu`` does with
    its noise. Such a tensor requires no gradient: of others, an operator would hand over a copy. So
    a recomputation ends within the operator that saves the last tensor only if all that this
    operator has saved requires a gradient, and else when a later operator saves something.
    """

    __slots__ = ("count", "due", "kept", "places", "unwritten", "whole")

    def __init__(self, places: Sequence[Saved], kept: Kept, whole: bool) -> None:
        self.places = places
        self.kept = kept
        self.whole = whole
        self.count = 0
        #: Autograd's next sequence number when an operator last saved a tensor to which it may
        #: still write; -1 if none did. As long as it is the next number, that operator may still
        #: run.
        self.unwritten = -1
        #: How many of `places` this run must reach: all if `whole`, else those up to the last slot.
        self.due = len(places)
        while not whole and not isinstance(places[self.due - 1], Slot):
            self.due -= 1

    @property
    def missing(self) -> Sequence[Saved]:
        """The places that the recomputation did not come to yet."""
        return self.places[self.count : self.due]

    @uncompiled
    def next(self, tensor: Tensor) -> None:
        """Fill the next slot.

        Raises:
            RuntimeError: the tensor is not like the one of the forward, or no slot is free.
            Enough: all slots are full, and all that is in them has been written.
        """
        count = self.count
        if count < self.due:
            saved = self.places[count]
            if isinstance(saved, Slot):
                saved.fill(tensor)
                # guard: what is written after it was saved
                if not self.whole and not tensor.requires_grad:
                    self.unwritten = _torch.next_node()
            else:
                # The checks of verify_like() spelt out, since a call for each tensor takes time.
                if saved is not tensor and (
                    saved.is_nested
                    or tensor.shape != saved.shape
                    or tensor.dtype is not saved.dtype
                    or current.name != self.kept.layers[id(saved)]
                ):
                    self.kept.verify_like(saved, tensor)
            self.count = count = count + 1
        elif self.whole:
            raise mismatch(described(tensor, current.name), "nothing more")
        if count == self.due and not self.whole and self.unwritten != _torch.next_node():
            raise Enough

    def verify_complete(self) -> None:
        """Check, after the recomputation, that it has saved all that it had to.

        Raises:
            RuntimeError: it has saved less than the first run.
        """
        for saved in self.missing:
            by = saved.layer if isinstance(saved, Slot) else self.kept.layers[id(saved)]
            raise mismatch("nothing more", described(saved, by))
