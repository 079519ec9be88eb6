"""Slots: each stands for a tensor that was saved for backward, until it is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.running import running

__all__ = ["verify_recomputation"]


#: The ``with`` blocks that the process is in.
_verifications: list[verify_recomputation] = []


class verify_recomputation(ContextDecorator):
    """Has recomputations compare what layers save for backward with what the forward saved.

    It finds layers that do not compute the same from the same input.

    ::

        with verify_recomputation():
            model(input).sum().backward()

    It concerns what runs forward within the block, and takes the memory that checkpointing saves.
    Without it, only number, shape and dtype of what layers save for backward are compared.
    """

    def __enter__(self) -> None:
        _verifications.append(self)

    def __exit__(self, *_: object) -> None:
        _verifications.remove(self)


class Slot:
    """The place of a saved tensor that was dropped, empty until it is recomputed.

    There is one for each tensor that a layer saves, which is most of what checkpointing costs the
    host: nothing is done here that can be done elsewhere.

    Args:
        tensor: what is to be saved.
    """

    __slots__ = ("dtype", "layer", "shape", "tensor", "version")

    tensor: Tensor | None
    version: int

    #: Whether what was saved is there anyway, as parameters are. It is never empty then.
    lasting = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.layer = running.layer

    def fill(self, tensor: Tensor) -> None:
        """Puts the recomputed tensor here.

        Raises:
            RuntimeError: it is not like the one that was saved in forward.
        """
        self.verify_like(tensor)
        # Detached: without the recomputed graph. It still counts changes with the tensor.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def verify_like(self, tensor: Tensor) -> None:
        """Checks that a tensor looks like the one that was saved in forward.

        Raises:
            RuntimeError: it does not.
        """
        layer = running.layer
        # Within another layer's own checkpointing it is not known in backward.
        other = layer is not None and layer != self.layer
        if other or tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise mismatch(described(tensor, layer), described(self, self.layer))

    def empty(self) -> None:
        """Has nothing there any more."""
        self.tensor = None

    def modified(self) -> RuntimeError:
        """What to raise where somebody has changed the tensor in place, as autograd does."""
        assert self.tensor is not None
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation (shape: {tuple(self.shape)}, version: {self.tensor._version}, "
            f"expected version: {self.version}); use the layer that changes it out of place"
        )


class Lasting(Slot):
    """The place of a saved tensor that is there anyway, and may be changed in place."""

    __slots__ = ("left",)

    tensor: Tensor
    lasting = True

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        # Detached: a tensor that is kept with its graph may be kept by it, and a leaf may get one.
        # guard: kept without its graph
        self.tensor = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        self.version = tensor._version

    def close(self) -> None:
        """Takes note of how often it was changed when the layers have run."""
        self.left = self.tensor._version

    @property
    def changed(self) -> bool:
        """Whether the layers have changed the tensor in place after they had saved it."""
        return self.left != self.version

    def open(self) -> None:
        """Gets ready for the second run of the layers, which may change what is theirs again."""
        if self.tensor._version == self.left:
            self.version = -1

    def fill(self, tensor: Tensor) -> None:
        """Only checks that the tensor of the second run is like this one."""
        self.verify_like(tensor)
        self.settle()

    def settle(self) -> None:
        """Takes what is there for right, if nobody but the layers has changed it."""
        if self.version == -1:
            self.version = self.tensor._version

    def empty(self) -> None:
        """It stays."""


class Compared(Slot):
    """A slot whose recomputed value is compared with that of the forward."""

    __slots__ = ("expected", "kind")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.kind = running.kind
        self.expected: Tensor | None = tensor.detach()

    def close(self) -> None:
        """Takes note of what there is when the layers have run: not before is all of it written."""
        assert self.expected is not None
        self.expected = self.expected.clone()

    def compare(self) -> None:
        """Compares the recomputed value.

        Raises:
            RuntimeError: it is another one.
        """
        expected, self.expected = self.expected, None
        try:
            torch.testing.assert_close(self.tensor, expected, equal_nan=True)
        except AssertionError as error:
            # It has run long since, but is what the note is to name.
            running.layer, running.kind = self.layer, self.kind
            raise RuntimeError(
                "a recomputation must compute the same values as the forward "
                f"(layer: {self.layer}, shape: {tuple(self.shape)}); make the layer compute the "
                f"same from the same input whenever it runs\n{error}"
            ) from None


def dropped(tensor: Tensor) -> Slot:
    """A slot for a tensor that is dropped.

    Bytes may be the workspace of a kernel, as that of an LSTM, of which some are never written.
    """
    if _verifications and tensor.dtype != torch.uint8:
        return Compared(tensor)
    return Slot(tensor)


class Enough(BaseException):
    """Ends a second run that has filled all slots.

    A BaseException, which layers that catch errors let pass. Hooks after forward do not run.
    """


class Filling:
    """Fills slots with what a second run saves.

    Args:
        slots: in the order in which the first run has saved.
        whole: whether the second run goes on to its end, behind the last one that was dropped.
    """

    def __init__(self, slots: Sequence[Slot], whole: bool) -> None:
        self.slots = slots
        self.whole = whole
        self.count = 0
        #: How many have to be filled; those behind are there.
        self.due = len(slots)
        while not whole and slots[self.due - 1].lasting:
            self.due -= 1

    @property
    def left(self) -> Sequence[Slot]:
        """Those that have not been filled."""
        return self.slots[self.count : self.due]

    @uncompiled
    def next(self, tensor: Tensor) -> None:
        """Fills the next slot.

        Raises:
            RuntimeError: it is not like what was saved in forward, or there is none.
            Enough: that was the last one.
        """
        if self.count < self.due:
            self.slots[self.count].fill(tensor)
        elif self.whole:
            raise mismatch(described(tensor, running.layer), "nothing more")
        self.count += 1
        if self.count == self.due and not self.whole:
            raise Enough


def described(saved: Tensor | Slot, layer: str | None) -> str:
    """A saved tensor in words."""
    by = f" by layer {layer}" if layer else ""
    return f"shape {tuple(saved.shape)} of {saved.dtype}{by}"


def mismatch(actual: str, expected: str) -> RuntimeError:
    """What to raise where a recomputation saves otherwise than the forward."""
    return RuntimeError(
        "a recomputation must save the same tensors for backward as the forward "
        f"(recomputation: {actual}, forward: {expected}); make the layers compute the same from "
        "the same input whenever they run (is_recomputing() tells the second run)"
    )
