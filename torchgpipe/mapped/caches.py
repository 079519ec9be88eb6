"""Caches of models that write text, which take memory in training, and cannot be joined."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []


def takes_cache(model: nn.Module) -> bool:
    """Whether a model has a keyword ``use_cache``, as models of Transformers do."""
    forward = inspect.signature(model.forward)
    return "use_cache" in forward.parameters or (
        any(x.kind is x.VAR_KEYWORD for x in forward.parameters.values())
        and any(hasattr(x, "use_cache") for x in _configs(getattr(model, "config", None)))
    )


def _configs(config: Any) -> Iterator[Any]:
    """A config and all objects within, as those of the models that a model is composed of."""
    waiting, seen = [config], set()
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Mapping):
            waiting += x.values()
        elif isinstance(x, list | tuple):
            waiting += x
        elif not isinstance(x, type | Tensor | nn.Module) and hasattr(x, "__dict__"):
            yield x
            waiting += vars(x).values()


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that turn caches off, unless they say something else."""
    return kwargs if kwargs.get("use_cache") is not None else {**kwargs, "use_cache": False}
