"""Slots: the places of tensors that were saved for backward, dropped, and are recomputed."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpipe.ambient.notes import layer as current

__all__: list[str] = []


class Slot:
    """The place of a saved tensor that was dropped, empty until the tensor is recomputed.

    Each tensor that a layer saves has a slot, which is most of the host time of checkpointing. So
    this class does nothing that can be done elsewhere.

    Args:
        tensor: the tensor that a layer saves.
        shapes: the shapes of other slots.
    """

    __slots__ = ("dtype", "layer", "shape", "tensor", "version")

    tensor: Tensor | None
    version: int

    def __init__(self, tensor: Tensor, shapes: dict[torch.Size, torch.Size]) -> None:
        self.tensor = None
        shape = tensor.shape
        # One object for equal shapes, since each is one more for the garbage collector.
        self.shape = shapes.setdefault(shape, shape)
        self.dtype = tensor.dtype
        self.layer = current.name

    def fill(self, tensor: Tensor) -> None:
        """Put the recomputed tensor here.

        Raises:
            RuntimeError: it is not like the tensor that was saved in forward.
        """
        # What verify_like() compares, without a call for each tensor.
        if (
            tensor.shape != self.shape
            or tensor.dtype is not self.dtype
            or current.name != self.layer
        ):
            verify_like(tensor, self, self.layer)
        # Detached, so without the recomputed graph. Both share one version counter.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def empty(self) -> None:
        """Let go of the tensor."""
        self.tensor = None


def verify_like(tensor: Tensor, saved: Tensor | Slot, by: str | None) -> None:
    """Check that a tensor has the shape and dtype of the one that was saved in forward.

    Args:
        tensor: the tensor of the second run.
        saved: the one that was saved in forward, or its place.
        by: the layer that saved it.

    Raises:
        RuntimeError: the tensor has others, or another layer saves it.
    """
    layer = current.name
    # Within another layer's own checkpointing, the layer is not known in backward.
    other = layer is not None and layer != by
    if other or _shape(tensor) != _shape(saved) or tensor.dtype != saved.dtype:
        raise mismatch(described(tensor, layer), described(saved, by))


def described(saved: Tensor | Slot, layer: str | None) -> str:
    """Describe a saved tensor in words."""
    by = f" by layer {layer}" if layer else ""
    return f"shape {_shape(saved)} of {saved.dtype}{by}"


def _shape(saved: Tensor | Slot) -> tuple[int, ...] | str:
    # Nested tensors have no shape, or one that is never equal to another one's.
    nested = isinstance(saved, Tensor) and saved.is_nested
    return "nested" if nested else tuple(saved.shape)


def mismatch(actual: str, expected: str) -> RuntimeError:
    """The error for a recomputation that saves other tensors than the forward."""
    return RuntimeError(
        "a recomputation must save the same tensors for backward as the forward "
        f"(recomputation: {actual}, forward: {expected}); make the layers compute the same from "
        "the same input whenever they run (is_recomputing() tells the second run)"
    )


def modified(tensor: Tensor, expected: int, layer: str | None) -> RuntimeError:
    """The error for a tensor that was changed in place, in autograd's words.

    Args:
        tensor: the tensor.
        expected: its version when it was saved.
        layer: the layer that saved it.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation (saved by layer: {layer}, shape: {tuple(tensor.shape)}, "
        f"version: {tensor._version}, expected version: {expected}); use the layer "
        "that changes it out of place"
    )


def explain(error: RuntimeError) -> None:
    """Say it in our words if layers have raised since they cannot run with hooks.

    Raises:
        RuntimeError: they have.
    """
    if "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "a partition whose layers call torch.func.grad, vjp, jacrev or hessian must keep what "
            "these save, since they take no hooks for saved tensors "
            f"(PyTorch: {error}); use checkpoint='never' for the partition"
        ) from error
