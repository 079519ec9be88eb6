"""The layers at the ends of a skip that several of the models have."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from torchgpipe.skip import Namespace, skippable, stash

__all__ = ["Stash", "isolated"]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Passes its input on, and stashes it for a later layer."""

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", input)
        return input


def isolated(layer: Any, namespace: Namespace) -> nn.Module:
    """A skippable layer, in a namespace: its method ``isolate`` is unknown to type checkers."""
    found: nn.Module = layer.isolate(namespace)
    return found
