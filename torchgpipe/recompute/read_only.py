"""Buffers that layers only read: a recomputation finds them as the forward did.

Somebody else may change such a buffer between a forward and its backward: a training loop advances
a counter, or a layer notes in its backward how large gradients are. Nobody can tell whether a layer
reads it. So each step copies those that are small, once, and a recomputation gets the copy of one
that has changed since. Of large ones, as masks and tables are, there is no copy, and such a change
is an error. PyTorch counts no change of a norm's statistics, so recomputations always get copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.autograd.versions import identities
from torchgpipe.devices.streams import current_stream, record_stream
from torchgpipe.recompute.once import OncePerMiniBatch

__all__: list[str] = []

#: Up to how many bytes a buffer is copied in each step.
SMALL = 1 << 16

#: The statistics of norms, whose changes PyTorch does not count.
UNCOUNTED = ("running_mean", "running_var")

#: A layer and the name of its buffer or parameter.
Place: TypeAlias = tuple[nn.Module, str]


class ReadOnly:
    """The buffers of a partition that no layer has changed so far, as a step finds them.

    Args:
        places: where they are.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        found = [(place, place[0]._buffers.get(place[1])) for place in places]
        self.found = [(place, x) for place, x in found if x is not None and not is_lazy(x)]
        self._tensors = [x for _, x in self.found]
        self._before = identities(self._tensors)
        #: Those of norms, of which nobody can tell whether they have changed.
        self._unseen = [(place, x) for place, x in self.found if place[1] in UNCOUNTED]
        copied = [x for x in self._tensors if x.nbytes <= SMALL and not x.requires_grad]
        copied += [x for _, x in self._unseen]
        # They are updated when all micro-batches were computed.
        copied += [x for place, x in self.found if isinstance(place[0], OncePerMiniBatch)]
        # The compute streams wait for this stream after that, as they do for weights.
        self._copies = {id(x): x.detach().clone() for x in copied}
        self._large = [(place, x) for place, x in self.found if id(x) not in self._copies]
        self._after = self._before

    def changed(self) -> list[tuple[Place, Tensor]]:
        """List those that somebody has changed, or replaced, since the step began."""
        pairs = zip(self.found, *self._before, *identities(self._tensors))
        return [
            (place, x)
            for (place, x), version, address, now, there in pairs
            if (version, address) != (now, there) or place[0]._buffers.get(place[1]) is not x
        ]

    def settle(self) -> None:
        """Take note that all cells have run: what changes from here on, others have changed."""
        self._after = identities([x for _, x in self._large])

    def as_they_were(self) -> list[tuple[Place, Tensor]]:
        """The values that a recomputation shall find, of those that have changed.

        A large one that layers themselves have begun to change in this step is as it is now.

        Raises:
            RuntimeError: somebody has changed a large one after the cells had run.
        """
        found = self._unseen
        if self._before != identities(self._tensors):
            self._verify_large()
            found = [*found, *self.changed()]
        return [(place, self._copy(x)) for place, x in found]

    def _verify_large(self) -> None:
        large = [x for _, x in self._large]
        if self._after is not self._before and self._after != (now := identities(large)):
            pairs = zip(self._large, zip(*self._after), zip(*now))
            raise _changed(*next(found for found, before, after in pairs if before != after))

    def _copy(self, x: Tensor) -> Tensor:
        copy = self._copies.get(id(x), x)
        record_stream(copy, current_stream(x.device))
        return copy


def _changed(place: Place, tensor: Tensor) -> RuntimeError:
    module, name = place
    return RuntimeError(
        "under checkpointing, a large buffer must not be changed between a forward and its "
        "backward, which computes the forward again "
        f"(layer: {type(module).__name__}, buffer: {name}, bytes: {tensor.nbytes}, "
        f"large: more than {SMALL}); change it after backward, or use checkpoint='never'"
    )
