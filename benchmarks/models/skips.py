"""The layer that begins a skip, and a typed ``isolate``, for several of the models."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from torchgpipe.skip import Namespace, skippable, stash

__all__ = ["Stash", "isolated"]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Pass the input on, and stash it for a later layer."""

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", input)
        return input


def isolated(layer: Any, namespace: Namespace) -> nn.Module:
    """Put a skippable layer into a namespace; type checkers do not know its method ``isolate``."""
    found: nn.Module = layer.isolate(namespace)
    return found
