"""Memory counted by storages, where no allocator counts it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__: list[str] = []


class LiveStorages(TorchDispatchMode):
    """Knows the storages that operators have made within its ``with`` block and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(output):
            if storage._cdata not in known:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output

    def sizes(self) -> list[int]:
        """The bytes of each."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return [size for _, size in self._made.values()]


def _storages(values: Any) -> list[Any]:
    # Sparse tensors have none of their own.
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return [x.untyped_storage() for x in tensors if x.layout == torch.strided]
