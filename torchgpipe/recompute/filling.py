"""Filling: what the second run of a cell saves goes into the slots of the first run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.notes import layer as current
from torchgpipe.recompute.kept import Kept
from torchgpipe.recompute.slots import Slot, described, mismatch

__all__: list[str] = []

#: The slot of a tensor that was dropped, or a tensor that exists anyway.
Saved: TypeAlias = Slot | Tensor


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
        places: the places of what the first run saved, in order.
        kept: the tensors among them that exist anyway.
        whole: whether the second run goes on to its end after it has filled the last slot.
    """

    __slots__ = ("count", "due", "kept", "places", "unwritten", "whole")

    def __init__(self, places: Sequence[Saved], kept: Kept, whole: bool) -> None:
        self.places = places
        self.kept = kept
        self.whole = whole
        self.count = 0
        #: The number of autograd's next node when a tensor came that may not be written yet. While
        #: it is the same number, the operator that saved the tensor may still run.
        self.unwritten = -1
        #: The number of places to come to. Behind them are only tensors that exist anyway.
        self.due = len(places)
        while not whole and not isinstance(places[self.due - 1], Slot):
            self.due -= 1

    @property
    def missing(self) -> Sequence[Saved]:
        """The places that the second run did not come to yet."""
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
            place = self.places[count]
            if isinstance(place, Slot):
                place.fill(tensor)
                # guard: what is written after it was saved
                if not tensor.requires_grad:
                    self.unwritten = _torch.next_node()
            else:
                if place is not tensor:
                    self.kept.verify_like(place, tensor)
                if place._version != self.kept.versions[id(place)]:
                    self.kept.accept(place, self.places[:count])
            self.count = count = count + 1
        elif self.whole:
            raise mismatch(described(tensor, current.name), "nothing more")
        if count == self.due and not self.whole and self.unwritten != _torch.next_node():
            raise Enough

    def settle(self) -> None:
        """Check, after the second run, that it has saved all that it had to.

        Raises:
            RuntimeError: it has saved less than the first run.
        """
        if self.count == len(self.places):
            return
        for place in self.missing:
            by = place.layer if isinstance(place, Slot) else self.kept.layers[id(place)]
            raise mismatch("nothing more", described(place, by))
        before, behind = self.places[: self.count], self.places[self.count :]
        self.kept.settle(before, [x for x in behind if isinstance(x, Tensor)])
