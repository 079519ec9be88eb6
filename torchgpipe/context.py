"""What a thread has set, so that another one can compute as if it were that thread.

Workers compute cells for the caller, and the autograd engine recomputes them, much later and on
threads of its own. Neither has any of the caller's modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from torchgpipe.stream import device_types

__all__: list[str] = []


class Autocast(NamedTuple):
    """Whether, and how, operators of one device type are cast."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


class Context(NamedTuple):
    """The modes of a thread: grad mode, inference mode, and autocast of each device type."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]

    @classmethod
    def capture(cls) -> Context:
        """The modes of this thread, now."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple([_autocast(kind) for kind in device_types()]),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the modes in this thread, whatever it had set, within a ``with`` block."""
        with ExitStack() as stack:
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            if self.grad != torch.is_grad_enabled():
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for wanted in self.autocast:
                current = _autocast(wanted.kind)
                if current != wanted and (current.enabled or wanted.enabled):
                    kind, enabled, dtype, cache = wanted
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            yield


def _autocast(kind: str) -> Autocast:
    return Autocast(
        kind,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )
