"""Private names of PyTorch's graphs: what operators declare, and which storage a tensor has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module

__all__: list[str] = []

GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)

aten = torch.ops.aten
#: Views by shape, for which a copy can stand as long as nobody changes their memory.
VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}


def schema_of(operator: Any) -> Any:
    """The declaration of an operator's arguments and results; None for other functions."""
    return getattr(operator, "_schema", None)


def has_global_hooks() -> bool:
    """Whether hooks run around all modules of the process."""
    return any(getattr(module, name, None) for name in GLOBAL_HOOKS)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, which views share; fake tensors have one, too."""
    found: int = tensor.untyped_storage()._cdata
    return found
