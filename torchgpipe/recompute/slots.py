"""Slots: the places of tensors that were saved for backward, dropped, and are recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.notes import layer as current

__all__: list[str] = []


class Slot:
    """The place of a saved tensor that was dropped, empty until the tensor is recomputed.

    Each tensor that a layer saves has a slot, which is most of the host time of checkpointing. So
    this class does nothing that can be done elsewhere.

    Args:
        tensor: the tensor that a layer saves.
    """

    __slots__ = ("dtype", "layer", "shape", "tensor", "version")

    tensor: Tensor | None
    version: int

    #: Whether the tensor exists anyway, as a parameter does. Then the slot is never empty.
    lasting = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.layer = current.name

    def fill(self, tensor: Tensor) -> None:
        """Put the recomputed tensor here.

        Raises:
            RuntimeError: it is not like the tensor that was saved in forward.
        """
        self.verify_like(tensor)
        # Detached, so without the recomputed graph. Both share one version counter.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def verify_like(self, tensor: Tensor) -> None:
        """Check that a tensor has the shape and dtype of the one that was saved in forward.

        Raises:
            RuntimeError: the tensor has others, or another layer saves it.
        """
        layer = current.name
        # Within another layer's own checkpointing, the layer is not known in backward.
        other = layer is not None and layer != self.layer
        if other or tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise mismatch(described(tensor, layer), described(self, self.layer))

    def empty(self) -> None:
        """Let go of the tensor."""
        self.tensor = None

    def modified(self) -> RuntimeError:
        """The error for a tensor that was changed in place, in autograd's words."""
        assert self.tensor is not None
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation (saved by layer: {self.layer}, shape: {tuple(self.shape)}, "
            f"version: {self.tensor._version}, expected version: {self.version}); use the layer "
            "that changes it out of place"
        )


class Lasting(Slot):
    """The place of a saved tensor that exists anyway, and may be changed in place."""

    __slots__ = ("after",)

    tensor: Tensor
    lasting = True

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        # Detached: a tensor with its graph may be kept alive by that graph, and a leaf may get one.
        # guard: kept without its graph
        self.tensor = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        self.version = tensor._version

    def close(self) -> None:
        """Take note of the number of changes when the layers have run."""
        self.after = self.tensor._version

    @property
    def changed(self) -> bool:
        """Whether the layers changed the tensor in place after they had saved it."""
        return self.after != self.version

    def open(self) -> None:
        """Prepare for the second run, in which the layers may change their own tensors again."""
        if self.tensor._version == self.after:
            self.version = -1

    def fill(self, tensor: Tensor) -> None:
        """Check that the tensor of the second run is like this one."""
        self.verify_like(tensor)
        self.settle()

    def settle(self) -> None:
        """Accept the tensor as it is now, if nobody but the layers has changed it."""
        if self.version == -1:
            self.version = self.tensor._version

    def empty(self) -> None:
        """Keep the tensor, which exists anyway."""


class Enough(BaseException):
    """The end of a second run that has filled all slots with tensors that are complete.

    It is a BaseException, since layers may catch errors. Forward hooks do not run after it.
    """


class Filling:
    """Hook for saved tensors that fills slots with what a second run saves.

    An operator may hand a tensor to autograd before it writes to the tensor, as ``rrelu`` does with
    its noise. Such a tensor requires no gradient: of others, an operator would hand over a copy. So
    a second run ends within the operator that saves the last tensor only if all that this operator
    has saved requires a gradient, and else when a later operator saves something.

    Args:
        slots: the slots, in the order in which the first run saved.
        whole: whether the second run goes on to its end after it has filled the last slot.
    """

    def __init__(self, slots: Sequence[Slot], whole: bool) -> None:
        self.slots = slots
        self.whole = whole
        self.count = 0
        #: The number of autograd's next node when a tensor came that may not be written yet. While
        #: it is the same number, the operator that saved the tensor may still run.
        self.unwritten = -1
        #: The number of slots to fill. Slots behind them hold tensors that exist anyway.
        self.due = len(slots)
        while not whole and slots[self.due - 1].lasting:
            self.due -= 1

    @property
    def unfilled(self) -> Sequence[Slot]:
        """The slots that were not filled yet."""
        return self.slots[self.count : self.due]

    @uncompiled
    def next(self, tensor: Tensor) -> None:
        """Fill the next slot.

        Raises:
            RuntimeError: the tensor is not like the one of the forward, or no slot is free.
            Enough: all slots are full, and all that is in them has been written.
        """
        if self.count < self.due:
            slot = self.slots[self.count]
            slot.fill(tensor)
            self.count += 1
            # guard: what is written after it was saved
            if not tensor.requires_grad and not slot.lasting:
                self.unwritten = _torch.next_node()
        elif self.whole:
            raise mismatch(described(tensor, current.name), "nothing more")
        if self.count == self.due and not self.whole and self.unwritten != _torch.next_node():
            raise Enough


def described(saved: Tensor | Slot, layer: str | None) -> str:
    """Describe a saved tensor in words."""
    by = f" by layer {layer}" if layer else ""
    return f"shape {tuple(saved.shape)} of {saved.dtype}{by}"


def mismatch(actual: str, expected: str) -> RuntimeError:
    """The error for a recomputation that saves other tensors than the forward."""
    return RuntimeError(
        "a recomputation must save the same tensors for backward as the forward "
        f"(recomputation: {actual}, forward: {expected}); make the layers compute the same from "
        "the same input whenever they run (is_recomputing() tells the second run)"
    )
