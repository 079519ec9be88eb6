"""The modes of a thread: what operators do there, besides what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.devices.streams import device_types

__all__: list[str] = []

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
    #: Whether backward uses a thread for each accelerator.
    multithreading: bool
    #: How many threads an operator uses on the CPU.
    threads: int
    #: Whether autocast casts a weight once.
    cache: bool
    autocast: tuple[Autocast, ...]
    #: The torch-function modes, the outermost first.
    functions: tuple[TorchFunctionMode, ...]
    #: The dispatch modes, the outermost first.
    dispatch: tuple[TorchDispatchMode, ...]

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

    def are_current(self) -> bool:
        """Whether this thread has them, now, whatever its grad mode is."""
        _, inference, multithreading, threads, cache, autocast, functions, dispatch = self
        if functions or dispatch:
            return self[1:] == Modes.current()[1:]
        # One by one: to collect them takes longer.
        for kind, enabled, dtype in autocast:
            if torch.is_autocast_enabled(kind) != enabled:
                return False
            if torch.get_autocast_dtype(kind) != dtype:
                return False
        return (
            torch.is_inference_mode_enabled() == inference
            and _C._is_multithreading_enabled() == multithreading
            and torch.get_num_threads() == threads
            and torch.is_autocast_cache_enabled() == cache
            and not _C._len_torch_function_stack()
            and not _C._len_torch_dispatch_stack()
        )


def current_hooks() -> Hooks | None:
    """The innermost hooks for saved tensors that this thread has, to pack and to unpack."""
    return _C._autograd._top_saved_tensors_default_hooks(False)


def is_within_autocast(modes: Modes) -> bool:
    """Whether the caller is in a block of autocast, which keeps what is cast until it is left.

    Args:
        modes: those of this thread, which may be one of autograd's, that is never in a block, but
            has the modes of where backward is called.
    """
    return autocast_nesting() > 0 or True in [autocast.enabled for autocast in modes.autocast]


def autocast_nesting() -> int:
    """In how many blocks of autocast this thread is, the one within the other."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def leave_autocast() -> None:
    """Leaves the innermost of them."""
    if torch.autocast_decrement_nesting() == 0:
        # Weights that were cast may change from here on.
        torch.clear_autocast_cache()


class own_casts:
    """Has autocast keep no weight that was cast within a ``with`` block after it.

    It knows a weight that was cast by the weight alone, whatever it has been cast to, and until
    the outermost block of autocast is left, whatever becomes of the weight.
    """

    def __enter__(self) -> None:
        self.cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self.cache)


def set_values(modes: Modes, before: Modes) -> None:
    """Sets what is a value, and may differ from what was set before."""
    # Inference mode has switched it, too.
    _C._set_multithreading_enabled(modes.multithreading)
    if modes.threads != before.threads:
        # guard: threads of an operator
        torch.set_num_threads(modes.threads)
    torch.set_autocast_cache_enabled(modes.cache)
    for wanted, current in zip(modes.autocast, before.autocast):
        if wanted != current:
            torch.set_autocast_enabled(wanted.kind, wanted.enabled)
            torch.set_autocast_dtype(wanted.kind, wanted.dtype)


def push(modes: Modes) -> None:
    """Has the modes that are called see operators.

    They are not entered: some begin anew then, as those that count.
    """
    for function in modes.functions:
        _C._push_on_torch_function_stack(function)
    for dispatch in modes.dispatch:
        _C._push_on_torch_dispatch_stack(dispatch)


def pop_all() -> None:
    """Has no mode see operators."""
    for _ in range(_C._len_torch_dispatch_stack()):
        _C._pop_torch_dispatch_stack(None)
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
