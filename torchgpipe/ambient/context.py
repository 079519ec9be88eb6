"""What a thread has set, so that another one can compute as if it were that thread.

Workers compute cells for the caller, and the autograd engine recomputes them, much later and on
threads of its own. Neither has any of the caller's modes.

What calls Python for each operator, or for each tensor that is saved for backward, does so in an
order that it may count on, and in one thread: beside such modes the caller computes alone.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from torchgpipe.ambient.modes import Modes, current_hooks, leave_autocast, pop_all, push, set_values
from torchgpipe.ambient.snapshot import Snapshot

__all__: list[str] = []

Result = TypeVar("Result")


class Context:
    """What a thread has set: its modes, and its context variables.

    Attributes:
        alone: whether only this thread may compute what is called in it.
        over: whether the forward is.
    """

    __slots__ = ("_variables", "alone", "modes", "over")

    def __init__(self) -> None:
        self.modes = Modes.current()
        self._variables = contextvars.copy_context()
        self.over = True
        self.alone = bool(
            self.modes.dispatch
            or current_hooks()
            or _C._autograd._saved_tensors_hooks_get_disabled_error_message()
            or not all(isinstance(mode, DeviceContext) for mode in self.modes.functions)
        )

    def entered(self, found: Snapshot) -> Entered:
        """Sets the modes in this thread within a ``with`` block.

        Args:
            found: what it has set.
        """
        return Entered(self.modes, found)

    def lend_threads(self) -> None:
        """Gives this thread as many threads for an operator as the caller has.

        It keeps them: to set them is to set what new threads begin with, too.
        """
        if torch.get_num_threads() != self.modes.threads:
            torch.set_num_threads(self.modes.threads)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Calls a function with the context variables; those that it sets are gone afterwards."""
        # A copy: what runs in one thread cannot run in another at the same time.
        return self._variables.copy().run(function, *args)


class Entered:
    """The modes of another thread, within a ``with`` block.

    Args:
        modes: these.
        found: what this thread has set.
    """

    def __init__(self, modes: Modes, found: Snapshot) -> None:
        self.modes = modes
        self.found = found

    def __enter__(self) -> None:
        # The grad mode most often differs alone, as it is off in backward.
        self.differs = self.found.modes is not self.modes
        self.guard: Any = None
        if self.differs:
            # guard: modes of backward
            pop_all()
            if self.found.modes.inference != self.modes.inference:
                self.guard = _C._InferenceMode(self.modes.inference)
                self.guard.__enter__()
            torch.autocast_increment_nesting()
            set_values(self.modes, self.found.modes)
        _C._set_grad_enabled(self.modes.grad)
        if self.differs:
            # guard: modes of a second run
            push(self.modes)

    def __exit__(self, *_: object) -> None:
        if self.differs:
            pop_all()
            leave_autocast()
            if self.guard is not None:
                self.guard.__exit__(None, None, None)
            set_values(self.found.modes, self.modes)
        _C._set_grad_enabled(self.found.grad)
        if self.differs:
            push(self.found.modes)


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
