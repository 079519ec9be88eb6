"""What a thread has set, so that another one can compute as if it were that thread.

Workers compute cells for the caller, and the autograd engine recomputes them, much later and on
threads of its own. Neither has any of the caller's modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the modes in this thread, whatever it had set, within a ``with`` block."""
        # Most often they differ in nothing but the grad mode, which is off in backward.
        grad, inference, autocast = Context.capture()
        if (inference, autocast) == (self.inference, self.autocast):
            torch._C._set_grad_enabled(self.grad)
            try:
                yield
            finally:
                torch._C._set_grad_enabled(grad)
            return
        with ExitStack() as stack:
            if inference != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for current, wanted in zip(autocast, self.autocast):
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
