"""Memory that one tensor has alone, so that nobody notices what is done with it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from torchgpipe import _torch

__all__: list[str] = []


def is_alone(tensor: Tensor) -> bool:
    """Whether a tensor has contiguous memory of its own, which nobody else can write to."""
    # A subclass may have its memory in tensors that it holds.
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    # Memory that PyTorch has not allocated may be anybody's.
    return (
        tensor.is_contiguous()
        and storage.nbytes() == tensor.nbytes
        and storage.resizable()
        and _torch.count_uses(storage._cdata) == _uses_of_one()
    )


@cache
def _uses_of_one() -> int:
    """The number of uses that memory of one tensor has while somebody asks."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    found: int = _torch.count_uses(storage._cdata)
    return found
