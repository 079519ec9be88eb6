"""What a thread has set, so that another one can compute as if it were that thread.

Workers compute cells for the caller, and the autograd engine recomputes them, much later and on
threads of its own. Neither has any of the caller's modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

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

    def entered(self) -> Entered:
        """Sets the modes in this thread, whatever it had set, within a ``with`` block."""
        return Entered(self)


class Entered:
    """The modes of another thread, within a ``with`` block."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __enter__(self) -> None:
        grad, inference, autocast = Context.capture()
        self.grad = grad
        self.others: ExitStack | None = None
        if (inference, autocast) != (self.context.inference, self.context.autocast):
            self.others = ExitStack()
            if inference != self.context.inference:
                self.others.enter_context(torch.inference_mode(self.context.inference))
            for current, wanted in zip(autocast, self.context.autocast):
                if current != wanted and (current.enabled or wanted.enabled):
                    kind, enabled, dtype, cache = wanted
                    self.others.enter_context(torch.autocast(kind, dtype, enabled, cache))
        # The grad mode most often differs alone, as it is off in backward.
        torch._C._set_grad_enabled(self.context.grad)

    def __exit__(self, *_: object) -> None:
        if self.others is not None:
            self.others.close()
        torch._C._set_grad_enabled(self.grad)


def _autocast(kind: str) -> Autocast:
    return Autocast(
        kind,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def verify_no_transform() -> None:
    """Checks that no transform of :mod:`torch.func` is active, which workers would not see.

    Raises:
        RuntimeError: one is.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            "a wrapped model cannot be called within a torch.func transform (grad, vmap, jvp, "
            "...), since these do not reach its workers and its backward; use "
            "torch.autograd.grad(), with create_graph=True for higher orders, or transform the "
            "plain model (model.module) on one device"
        )


def verify_no_tangents(tensors: Iterable[Tensor]) -> None:
    """Checks that none of the tensors has a tangent, which would be lost.

    Raises:
        RuntimeError: one has.
    """
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "a wrapped model cannot be differentiated in forward mode (tensor with a tangent: "
                f"{tuple(tensor.shape)}); use torch.autograd.functional.jvp(), which goes "
                "backward twice, or the plain model (model.module) on one device"
            )
