"""Phonies: empty tensors that carry nothing but a dependency."""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []

_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return the phony of a device: a tensor of shape ``(0,)`` that takes no memory.

    A phony that requires a gradient is the edge between two autograd functions: it makes
    one wait for the other without passing any data. Each device has one, since an empty
    tensor takes time to make, too.
    """
    key = (device, requires_grad)
    if key not in _phonies:
        # The phony outlives the mode in which it was asked for first.
        with torch.inference_mode(False):
            _phonies[key] = torch.empty(0, device=device, requires_grad=requires_grad)
    return _phonies[key]
