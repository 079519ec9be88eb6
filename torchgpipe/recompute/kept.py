"""Tensors that layers save for backward and that exist anyway: weights, buffers and the input.

They are neither dropped nor recomputed. What has to be known of them is how often each had been
changed in place when a layer saved it: after a change, its gradients would be wrong without a word.

Weights and buffers are almost half of what layers save. So each is its own place in the list of
slots, and its version is a number in a table. Objects for them would take time in each cell, and in
Python's garbage collector even more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from torchgpipe.ambient.notes import layer as current
from torchgpipe.recompute.slots import modified, verify_like

__all__: list[str] = []

_version = attrgetter("_version")

_NONE: frozenset[int] = frozenset()


class Kept:
    """The tensors that the layers of one cell save, and that exist anyway."""

    __slots__ = (
        "_after",
        "_changed_by_others",
        "_opened",
        "_several",
        "layers",
        "tensors",
        "versions",
    )

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        #: The version that backward shall find, by the identity of the tensor.
        self.versions: dict[int, int] = {}
        #: The layer that saved the tensor first, by the identity of the tensor.
        self.layers: dict[int, str | None] = {}
        #: The tensors that several layers have saved.
        self._several = _NONE
        #: The versions when the layers had run.
        self._after: tuple[int, ...] = ()
        self._changed_by_others = _NONE
        #: The versions when the second run began.
        self._opened: tuple[int, ...] = ()

    def add(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that a layer saves; return what autograd shall hold instead."""
        version = tensor._version
        # One number for both tables: a pipeline keeps very many.
        own = id(tensor)
        if self.versions.setdefault(own, version) != version:
            # The layers have changed it since another one saved it, so it needs a second number.
            tensor = tensor.detach()
            own = id(tensor)
            self.versions[own] = version
        if self.layers.setdefault(own, current.name) != current.name:
            self._several |= {own}
        self.tensors.append(tensor)
        return tensor

    def close(self) -> None:
        """Take note of the versions when the layers have run."""
        self._after = tuple(map(_version, self.tensors))

    @property
    def changed(self) -> bool:
        """Whether the layers changed a tensor in place after they had saved it."""
        return self._after != tuple(map(self.versions.get, map(id, self.tensors)))

    def open(self) -> None:
        """Prepare for the second run, in which the layers may change their own tensors again."""
        self._opened = now = tuple(map(_version, self.tensors))
        if now != self._after:
            pairs = zip(self.tensors, now, self._after)
            changed = [id(x) for x, found, after in pairs if found != after]
            self._changed_by_others = frozenset(changed)

    def verify_like(self, kept: Tensor, tensor: Tensor) -> None:
        """Check that a tensor that a second run saves is like the one that is kept.

        Raises:
            RuntimeError: it is not.
        """
        by = current.name if id(kept) in self._several else self.layers[id(kept)]
        verify_like(tensor, kept, by)

    def accept(self, tensor: Tensor, before: Sequence[Any]) -> None:
        """Accept a change in a second run before it saves the tensor, as in the first run.

        Args:
            tensor: the tensor.
            before: what the second run has saved so far. If the tensor is among it, its change came
                too late, and backward raises an error.
        """
        if id(tensor) in self._changed_by_others or any(x is tensor for x in before):
            return
        # A second run may change a copy instead. Then a change of the tensor itself is of the first
        # run, after it had been saved.
        # guard: changes of the first run
        if dict(zip(map(id, self.tensors), self._opened))[id(tensor)] != tensor._version:
            self.versions[id(tensor)] = tensor._version

    def settle(self, before: Sequence[Any], behind: Sequence[Any]) -> None:
        """Accept changes of tensors that a second run did not save, since it ended before.

        Args:
            before: what the second run has saved.
            behind: what it has not saved.
        """
        for tensor in behind:
            if tensor._version != self.versions[id(tensor)]:
                self.accept(tensor, before)

    def let_go(self) -> None:
        """Let go of the tensors; only autograd holds them from here on."""
        self.tensors.clear()

    def modified(self, tensor: Tensor) -> RuntimeError:
        """The error for a tensor that was changed in place since a layer saved it."""
        return modified(tensor, self.versions[id(tensor)], self.layers[id(tensor)])
