"""Storages that layers have saved views of, and that are in the host's memory for a while.

A storage is the unit: what it holds is copied once, however many tensors were saved of it. Each of
these is a :class:`View`, which is rebuilt with its strides when backward asks for it.

Device memory that a copy stream reads or writes must not be used again before the copy is done. Who
computes waits for the copy first, and then lets go of the memory. Where that does not happen, as
when a backward fails, the storage announces the copy to the allocator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe.ambient.notes import layer as current
from torchgpipe.autograd.halves import gone
from torchgpipe.devices.pool import HostMemory
from torchgpipe.devices.streams import AbstractStream, Event, record_stream
from torchgpipe.values.structure import is_dense

__all__: list[str] = []

#: The fewest bytes of a storage that leaves: to copy fewer takes no less time, and frees less.
LEAST = 1024


class Storage:
    """A storage that leaves its device: all its bytes as one tensor, on the device or the host."""

    __slots__ = ("__weakref__", "buffer", "event", "here", "lane", "memory", "size")

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        #: The bytes on the device; None while only `buffer` has them.
        self.here: Tensor | None = flat(tensor)
        self.size = len(self.here)
        self.memory = memory
        #: Pinned memory of the host with the bytes, and maybe more; None before to_host().
        self.buffer: Tensor | None = None
        #: The event after the last copy from or to `buffer`, for which its next user waits.
        self.event: Event | None = None
        #: The stream of a copy for which the compute stream has not waited yet; None without any.
        self.lane: AbstractStream | None = None

    def to_host(self) -> None:
        """Copy the bytes to the host. The stream that does is current."""
        assert self.here is not None
        self.buffer = self.memory.take(self.size)
        self.lane = self.memory.out
        self.buffer[: self.size].copy_(self.here, non_blocking=True)

    def make_room(self, device: torch.device) -> None:
        """Take memory for the bytes again. The stream that computes is current."""
        self.here = torch.empty(self.size, dtype=torch.uint8, device=device)

    def to_device(self) -> None:
        """Copy the bytes back. The stream that does is current."""
        assert self.here is not None
        assert self.buffer is not None
        self.lane = self.memory.back
        self.here.copy_(self.buffer[: self.size], non_blocking=True)

    def __del__(self) -> None:
        if self.lane is not None and self.here is not None:
            # guard: copies that nobody waits for
            record_stream(self.here, self.lane)
        if self.buffer is not None:
            self.memory.give(self.buffer, self.event)


class View:
    """A tensor that a layer has saved."""

    __slots__ = ("__weakref__", "kept", "layer", "layout", "storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a tensor and its graph would hold each other. Versions still count changes.
        # guard: saved without its graph
        self.kept: Tensor | None = tensor if is_own_leaf(tensor) else tensor.detach()
        self.version = tensor._version
        self.layer = current.name
        self.storage: Storage | None = None
        self.layout: tuple[Any, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place since the layer has saved it."""
        return self.kept is not None and self.kept._version != self.version

    def move_into(self, storage: Storage) -> None:
        """Let go of the tensor, of which the storage has the values."""
        x = self.kept
        assert x is not None
        self.storage = storage
        self.layout = x.dtype, x.storage_offset(), x.size(), x.stride()
        self.kept = None

    def empty(self) -> None:
        """Let go of the tensor, and of the storage."""
        self.kept = self.storage = None

    def rebuild(self, device: torch.device) -> Tensor:
        """Make the tensor from what has come back.

        Raises:
            RuntimeError: a schedule has let go of it.
        """
        if self.storage is None:
            raise gone()
        assert self.storage.here is not None
        dtype, *layout = self.layout
        empty = torch.empty(0, dtype=dtype, device=device)
        self.kept = x = empty.set_(self.storage.here.untyped_storage(), *layout)
        self.version = x._version
        return x


def is_own_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or the like, which no graph leads to.

    Autograd itself saves those as they are: after ``parameter.data = ...`` it uses the new values.
    """
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter))


def flat(tensor: Tensor) -> Tensor:
    """All bytes of the storage of a tensor."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def storage_key(tensor: Tensor, device: torch.device) -> int:
    """A number for the storage of a tensor that may leave; 0 for one that stays where it is.

    Weights stay, and views of these. So do tensors of other devices, and those that are more than
    strided views of a storage.
    """
    base = tensor._base
    # guard: weights stay
    if type(tensor) is not Tensor or is_own_leaf(tensor):
        return 0
    if base is not None and (type(base) is not Tensor or is_own_leaf(base)):
        return 0
    if tensor.device != device or not is_dense(tensor):
        return 0
    # guard: more than views
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return 0
    try:
        storage = tensor.untyped_storage()
        # A small view of a large storage leaves, since it would keep all of the storage there.
        # guard: small views of large storages
        return storage._cdata if storage.nbytes() >= LEAST else 0
    except (RuntimeError, NotImplementedError):
        # Tensors within transforms of torch.func have no storage.
        return 0


def storage_bytes(views: list[View]) -> int:
    """The bytes of the storage of some views."""
    return _first(views).untyped_storage().nbytes()


def is_held(views: list[View]) -> bool:
    """Whether anybody but these views has a storage, which would stay on the device anyway."""
    storage = _first(views).untyped_storage()
    # Besides the views, the object `storage` counts as one more user.
    return bool(_torch.count_uses(storage._cdata) > len(views) + 1)


def sent(views: list[View], memory: HostMemory) -> Storage:
    """Make a storage of the memory that some views share; they let go of their tensors."""
    storage = Storage(_first(views), memory)
    for view in views:
        view.move_into(storage)
    return storage


def _first(views: list[View]) -> Tensor:
    tensor = views[0].kept
    assert tensor is not None
    return tensor
