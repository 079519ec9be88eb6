"""What a thread has set, so that another one can compute as if it were that thread.

Workers compute cells for the caller, and the autograd engine recomputes them, much later and on
threads of its own. Neither has any of the caller's modes.

What calls Python for each operator, or for each tensor that is saved for backward, does so in an
order that it may count on, and in one thread: beside such modes the caller computes alone.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.stream import device_types

__all__: list[str] = []

Result = TypeVar("Result")

#: How tensors are packed that are saved for backward, and unpacked.
Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Autocast(NamedTuple):
    """Whether, and how, operators of one device type are cast."""

    kind: str
    enabled: bool
    dtype: torch.dtype


class Modes(NamedTuple):
    """The modes of a thread."""

    grad: bool
    inference: bool
    multithreading: bool
    """Whether backward uses a thread for each accelerator."""
    threads: int
    """How many threads an operator uses on the CPU."""
    cache: bool
    """Whether autocast casts a weight once."""
    autocast: tuple[Autocast, ...]
    functions: tuple[TorchFunctionMode, ...]
    """The torch-function modes, the outermost first."""
    dispatch: tuple[TorchDispatchMode, ...]
    """Likewise."""

    @classmethod
    def current(cls) -> Modes:
        """Those of this thread, now."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _C._is_multithreading_enabled(),
            torch.get_num_threads(),
            torch.is_autocast_cache_enabled(),
            tuple(
                [
                    Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                    for kind in device_types()
                ]
            ),
            tuple(map(_C._get_function_stack_at, range(_C._len_torch_function_stack()))),
            tuple(map(_C._get_dispatch_stack_at, range(_C._len_torch_dispatch_stack()))),
        )

    def put_back(self) -> None:
        """Has this thread be as it was, but for inference mode."""
        now = Modes.current()
        if now != self:
            _pop_all()
            _set(self, now)
            _C._set_grad_enabled(self.grad)
            _push(self)


class Context:
    """What a thread has set: its modes, and its context variables.

    Attributes:
        alone: whether only this thread may compute what is called in it.
    """

    __slots__ = ("_variables", "alone", "modes")

    def __init__(self) -> None:
        self.modes = Modes.current()
        self._variables = contextvars.copy_context()
        self.alone = bool(
            self.modes.dispatch
            or current_hooks()
            or _C._autograd._saved_tensors_hooks_get_disabled_error_message()
            or not all(isinstance(mode, DeviceContext) for mode in self.modes.functions)
        )

    def entered(self) -> Entered:
        """Sets the modes in this thread, whatever it had set, within a ``with`` block."""
        return Entered(self.modes)

    def lend_threads(self) -> None:
        """Gives this thread as many threads for an operator as the caller has.

        It keeps them: whoever set them back would set what threads to come begin with, too.
        """
        if torch.get_num_threads() != self.modes.threads:
            torch.set_num_threads(self.modes.threads)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Calls a function with the context variables; those that it sets are gone afterwards."""
        # A copy: what runs in one thread cannot run in another at the same time.
        return self._variables.copy().run(function, *args)


def current_hooks() -> Hooks | None:
    """The innermost hooks for saved tensors that this thread has, to pack and to unpack."""
    return _C._autograd._top_saved_tensors_default_hooks(False)


class Entered:
    """The modes of another thread, within a ``with`` block."""

    def __init__(self, modes: Modes) -> None:
        self.modes = modes

    def __enter__(self) -> None:
        self.found = Modes.current()
        # The grad mode most often differs alone, as it is off in backward.
        self.differs = self.found[1:] != self.modes[1:]
        self.guard: Any = None
        if self.differs:
            _pop_all()
            if self.found.inference != self.modes.inference:
                self.guard = _C._InferenceMode(self.modes.inference)
                self.guard.__enter__()
            torch.autocast_increment_nesting()
            _set(self.modes, self.found)
        _C._set_grad_enabled(self.modes.grad)
        if self.differs:
            _push(self.modes)

    def __exit__(self, *_: object) -> None:
        if self.differs:
            _pop_all()
            if torch.autocast_decrement_nesting() == 0:
                # Weights that were cast may change from here on.
                torch.clear_autocast_cache()
            if self.guard is not None:
                self.guard.__exit__(None, None, None)
            _set(self.found, self.modes)
        _C._set_grad_enabled(self.found.grad)
        if self.differs:
            _push(self.found)


def _set(modes: Modes, before: Modes) -> None:
    """Sets what is a value, and may differ from what was set before."""
    # Inference mode has switched it, too.
    _C._set_multithreading_enabled(modes.multithreading)
    if modes.threads != before.threads:
        torch.set_num_threads(modes.threads)
    torch.set_autocast_cache_enabled(modes.cache)
    for wanted, current in zip(modes.autocast, before.autocast):
        if wanted != current:
            torch.set_autocast_enabled(wanted.kind, wanted.enabled)
            torch.set_autocast_dtype(wanted.kind, wanted.dtype)


# Modes are not entered: some begin anew then, as those that count.


def _push(modes: Modes) -> None:
    for function in modes.functions:
        _C._push_on_torch_function_stack(function)
    for dispatch in modes.dispatch:
        _C._push_on_torch_dispatch_stack(dispatch)


def _pop_all() -> None:
    for _ in range(_C._len_torch_dispatch_stack()):
        _C._pop_torch_dispatch_stack(None)
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()


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
