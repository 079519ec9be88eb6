"""Caches of models that write text, which take memory in training, and cannot be joined."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

__all__: list[str] = []


def takes_cache(model: nn.Module) -> bool:
    """Whether a model has a keyword ``use_cache``, as models of Transformers do."""
    forward = inspect.signature(model.forward)
    return "use_cache" in forward.parameters or (
        any(x.kind is x.VAR_KEYWORD for x in forward.parameters.values())
        and hasattr(getattr(model, "config", None), "use_cache")
    )


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that turn caches off, unless they say something else."""
    return kwargs if kwargs.get("use_cache") is not None else {**kwargs, "use_cache": False}
