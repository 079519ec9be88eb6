"""The input of a checkpointed cell, which a step keeps for the recomputation.

The caller's own hooks for saved tensors see this input, as if autograd had saved it, and may put it
somewhere else. They do not see tensors that a recomputation computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import Hooks
from torchgpipe.ambient.notes import layer as current
from torchgpipe.autograd.fork_join import Unpack, get_phony
from torchgpipe.autograd.versions import version_of
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class StoredInput:
    """The input of a cell, as it was before the cell was computed.

    Args:
        batch: the input.
        hooks: the caller's hooks for saved tensors.
    """

    __slots__ = ("_batch", "_changed_by", "_packed", "_tensors", "_versions", "hooks")

    def __init__(self, batch: Batch, hooks: Hooks | None) -> None:
        self.hooks = hooks
        self._batch = batch
        self._tensors = [*batch]
        self._versions = [*map(version_of, self._tensors)]
        #: The name and the class of the layer that changed the input in place.
        self._changed_by: tuple[str | None, str | None] | None = None
        #: With hooks: for each tensor what they packed, and whether it required a gradient.
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
        # Not by the property, since each layer is watched.
        if self._changed_by is None and self._versions != [*map(version_of, self._tensors)]:
            self._changed_by = current.name, current.kind

    def verify(self) -> None:
        """Check, after the first run, that the layers have left the input as it was.

        Raises:
            RuntimeError: a layer changed the input in place.
        """
        if self.unchanged:
            return
        # The note on the error names the layer, and in a device map the module.
        current.name, current.kind = self._changed_by or (None, None)
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
            # The callers of the layers hold the value all the while, and leaves take less time.
            return self._batch.replace([x.detach().requires_grad_(need) for x, need in tensors])
        phony = get_phony(needing[0].device, requires_grad=True)
        with torch.enable_grad():
            found = iter(Unpack.apply(phony, *needing))
        # guard: no leaves
        return self._batch.replace([next(found) if need else x.detach() for x, need in tensors])
