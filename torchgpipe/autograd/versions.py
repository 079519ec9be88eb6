"""Version counters: how changes in place are noticed where autograd would not look."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from torchgpipe.autograd.fork_join import get_phony

__all__: list[str] = []

#: The versions of some tensors, and their addresses. If one of these differs at a second look, its
#: tensor has changed.
Identities: TypeAlias = tuple[list[int], list[int]]

_version = attrgetter("_version")

#: The result of :func:`counter_of` for inference tensors, which have no version counter.
with torch.inference_mode():
    _UNCOUNTED = torch.empty(0, device="cpu")


def version_of(tensor: Tensor) -> int:
    """The number of changes in place of a tensor; -1 if nobody counts them."""
    try:
        return tensor._version
    except RuntimeError:
        # Inference tensors have no version.
        return -1


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; -1 if it has none of its own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):
        # Sparse and lazy tensors have no address.
        return -1


def identities(tensors: Sequence[Tensor]) -> Identities:
    """The versions and addresses of tensors: ``parameter.data = ...`` changes an address alone."""
    try:
        return [*map(_version, tensors)], [*map(Tensor.data_ptr, tensors)]
    except (RuntimeError, ValueError, NotImplementedError):
        # One of the tensors has no version or no address. So each is asked on its own.
        return [*map(version_of, tensors)], [*map(address_of, tensors)]


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of another one without keeping its memory alive."""
    if tensor.is_inference():
        return _UNCOUNTED
    counter = tensor.detach()
    # Sparse tensors and those of functorch refuse another .data. Then the counter keeps the memory
    # of the tensor alive.
    with suppress(RuntimeError):
        counter.data = get_phony(tensor.device, requires_grad=False)
    return counter


class unchanged:
    """Check that what every micro-batch gets whole is not changed within a ``with`` block.

    Raises:
        RuntimeError: a tensor was changed in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> None:
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # guard: versions of what goes whole
        if kind is None and self.versions != [version_of(tensor) for tensor in self.tensors]:
            raise RuntimeError(
                "what every micro-batch gets whole must not be changed in place, since others get "
                f"it, too (shapes: {[tuple(tensor.shape) for tensor in self.tensors]}); clone it "
                "in the layer that changes it"
            )
