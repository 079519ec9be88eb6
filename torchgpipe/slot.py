"""Slots: each stands for a tensor that was saved for backward, until it is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator

import torch
from torch import Tensor

from torchgpipe.compiler import uncompiled
from torchgpipe.running import running
from torchgpipe.state import version_of

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
    """The place of one saved tensor, empty until it is recomputed.

    Args:
        tensor: what is to be saved.
        lasting: whether it is there anyway, as parameters are. It is never empty then.
    """

    __slots__ = (
        "dtype",
        "expected",
        "kind",
        "lasting",
        "layer",
        "left",
        "shape",
        "tensor",
        "version",
    )

    tensor: Tensor | None

    def __init__(self, tensor: Tensor, lasting: bool) -> None:
        self.layer, self.kind = running.layer, running.kind
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.lasting = lasting
        # Detached: a tensor that is kept with its graph may be kept by it.
        self.tensor = tensor.detach() if lasting else None
        self.version = version_of(tensor)
        #: What it is to be compared with.
        self.expected = tensor.detach() if _verifications and is_compared(tensor, lasting) else None

    def close(self) -> None:
        """Takes note of what there is when the layers have run: not before is all of it written."""
        if self.expected is not None:
            self.expected = self.expected.clone()
        if self.tensor is not None:
            self.left = version_of(self.tensor)

    @property
    def changed(self) -> bool:
        """Whether the layers have changed the tensor in place after they had saved it."""
        return self.tensor is not None and self.left != self.version

    def open(self) -> None:
        """Gets ready for the second run of the layers, which may change what is theirs again."""
        if self.tensor is not None and version_of(self.tensor) == self.left:
            self.version = -1

    def empty(self) -> None:
        """Has nothing there any more."""
        if not self.lasting:
            self.tensor = None

    def fill(self, tensor: Tensor) -> None:
        """Puts the recomputed tensor here.

        Raises:
            RuntimeError: it is not like the one that was saved in forward.
        """
        # Within another layer's own checkpointing it is not known in backward.
        other = running.layer not in (None, self.layer)
        if other or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise mismatch(described(tensor, running.layer), described(self, self.layer))
        if not self.lasting:
            # Detached: without the recomputed graph. It still counts changes with the tensor.
            self.tensor = tensor.detach()
            self.version = version_of(tensor)
        else:
            self.settle()

    def settle(self) -> None:
        """Takes what is there for right, if nobody but the layers has changed it."""
        if self.version == -1 and self.tensor is not None:
            self.version = version_of(self.tensor)

    def verify_unchanged(self) -> None:
        """Checks that nobody has changed the tensor in place, as autograd does.

        Raises:
            RuntimeError: somebody has.
        """
        assert self.tensor is not None
        version = version_of(self.tensor)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation (shape: {tuple(self.shape)}, version: {version}, expected "
                f"version: {self.version}); use the layer that changes it out of place"
            )

    def compare(self) -> None:
        """Compares the recomputed value, if one was kept.

        Raises:
            RuntimeError: it is another one.
        """
        expected, self.expected = self.expected, None
        if expected is None:
            return
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


def is_compared(tensor: Tensor, lasting: bool) -> bool:
    """Whether a saved tensor has a value of which each run makes its own.

    Bytes may be the workspace of a kernel, as that of an LSTM, of which some are never written.
    """
    return not lasting and tensor.dtype != torch.uint8


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
