"""Private names of PyTorch's graphs: what operators declare, and which storage a tensor has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__: list[str] = []


def schema_of(operator: Any) -> Any:
    """The declaration of an operator's arguments and results; None for other functions."""
    return getattr(operator, "_schema", None)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, which views share; fake tensors have one, too."""
    found: int = tensor.untyped_storage()._cdata
    return found
