"""The modes and variables that a thread has set: captured, entered in another thread, put back.

Operators depend on more than their arguments: grad mode, autocast, modes that see each operator.
Workers compute cells for the caller, and the autograd engine recomputes them, much later and on
threads of its own. Neither thread has the caller's modes. So a step captures the :class:`Context`
of its caller, and each thread that computes for the step enters it.

Modes that call Python for each operator, and hooks that are called for each saved tensor, may rely
on being called in order and in one thread: with such modes the caller computes alone.

:class:`SavedSettings` are for Ctrl-C. A context manager restores what it has set, but an interrupt
may come within its own ``__enter__`` or ``__exit__``. Then layers of other models would run in a
mode of ours, or our saved-tensor hooks would see the tensors that those layers save.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident, main_thread
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe.devices.streams import current_streams, device_types, set_streams

__all__: list[str] = []


# Thread-local attributes, registered so that they can be restored after Ctrl-C.
#
# Among them are the function to call when a layer has run (:mod:`torchgpipe.ambient.notes`),
# whether the thread computes a cell (:mod:`torchgpipe.ambient.generators`), which run of the cell
# that is (:mod:`torchgpipe.recompute.runs`), and its skips (:mod:`torchgpipe.skip.tracker`).


Local = TypeVar("Local", bound=threading.local)

_registered: list[threading.local] = []


def registered(local: Local) -> Local:
    """Register attributes for :func:`saved` and :func:`put_back`, and return them."""
    _registered.append(local)
    return local


def saved() -> list[dict[str, Any]]:
    """Copies of all registered attributes of this thread."""
    return [*map(dict, map(vars, _registered))]


def put_back(values: list[dict[str, Any]]) -> None:
    """Set all registered attributes of this thread to what :func:`saved` has returned."""
    for local, value in zip(_registered, values):
        vars(local).clear()
        vars(local).update(value)


class Swap:
    """Attributes of a thread with other values, within a ``with`` block.

    A class, as all context managers that are entered for each cell: @contextmanager takes longer.
    """

    __slots__ = ("_before", "_local", "_values")

    def __init__(self, local: threading.local, **values: Any) -> None:
        self._local, self._values = local, values

    def __enter__(self) -> None:
        attributes = self._local.__dict__
        self._before = attributes.copy()
        attributes.update(self._values)

    def __exit__(self, *_: object) -> None:
        # All attributes at once: to set them one by one takes longer.
        attributes = self._local.__dict__
        attributes.clear()
        attributes.update(self._before)


Result = TypeVar("Result")

#: Hooks for tensors saved for backward: the first packs a tensor, the second unpacks it.
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
    #: The number of threads that an operator uses on the CPU.
    threads: int
    #: Whether autocast caches the weights that it casts.
    cache: bool
    autocast: tuple[Autocast, ...]
    #: The torch-function modes, the outermost first.
    functions: tuple[TorchFunctionMode, ...]
    #: The dispatch modes, the outermost first.
    dispatch: tuple[Any, ...]

    @classmethod
    def current(cls) -> Modes:
        """The modes that this thread has now."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _torch.is_multithreading_enabled(),
            torch.get_num_threads(),
            torch.is_autocast_cache_enabled(),
            tuple(
                [
                    Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                    for kind in device_types()
                ]
            ),
            tuple([_torch.function_mode_at(k) for k in range(_torch.count_function_modes())]),
            tuple([_torch.dispatch_mode_at(k) for k in range(_torch.count_dispatch_modes())]),
        )

    def are_current(self) -> bool:
        """Whether this thread has these modes now, whatever its grad mode is."""
        _, inference, multithreading, threads, cache, autocast, functions, dispatch = self
        if functions or dispatch:
            return self[1:] == Modes.current()[1:]
        # The thread's modes are compared one by one: to collect them in a Modes takes longer.
        for kind, enabled, dtype in autocast:
            if torch.is_autocast_enabled(kind) != enabled:
                return False
            if torch.get_autocast_dtype(kind) != dtype:
                return False
        return (
            torch.is_inference_mode_enabled() == inference
            and _torch.is_multithreading_enabled() == multithreading
            and torch.get_num_threads() == threads
            and torch.is_autocast_cache_enabled() == cache
            and not _torch.count_function_modes()
            and not _torch.count_dispatch_modes()
        )


def current_hooks() -> Hooks | None:
    """The innermost hooks for saved tensors that this thread has; None without any."""
    hooks: Hooks | None = _torch.top_hooks(False)
    return hooks


def leave_checkpoints(error: BaseException | None, handled: BaseException | None) -> None:
    """Leave the checkpoints of PyTorch that an error has come out of.

    Before PyTorch 2.13 a generator leaves their hooks and modes. It waits in a frame until nobody
    refers to the error any more, and would then leave those of others, or of another thread.

    Args:
        error: the error, which refers to those that were handled when it was raised.
        handled: the one that was handled already when the block began that the error leaves.
    """
    # `seen` ends the loop where errors refer to each other in a circle.
    seen = {id(handled)}
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                # A frame that still runs refuses to be cleared: the error has not come out of it.
                with suppress(RuntimeError):
                    frame.clear()
        error = error.__context__


def is_in_checkpoint() -> bool:
    """Whether this thread computes within a checkpoint of PyTorch, one without reentrance."""
    hooks = current_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


class Context:
    """The modes and the context variables of the thread that makes this object.

    Attributes:
        modes: the modes.
        nested: whether the thread is in a block of autocast, which keeps the weights that it casts.
        alone: whether only this thread may compute with them.
        over: whether the forward that the context was captured for is over.
    """

    __slots__ = ("_variables", "alone", "modes", "nested", "over")

    def __init__(self) -> None:
        self.modes = Modes.current()
        self.nested = autocast_nesting() > 0
        self._variables = contextvars.copy_context()
        self.over = True
        self.alone = bool(
            self.modes.dispatch
            or current_hooks()
            or _torch.hooks_forbidden()
            or not all(isinstance(mode, _torch.DeviceContext) for mode in self.modes.functions)
        )

    def entered(self, settings: SavedSettings) -> EnteredModes:
        """Context manager that sets the modes in this thread, which has other settings."""
        return EnteredModes(self.modes, self.nested, settings)

    def use_callers_threads(self) -> None:
        """Let operators of this thread use as many CPU threads as the caller's do.

        The number is not restored: to set it also sets the default of new threads, so it must not
        change back and forth.
        """
        if torch.get_num_threads() != self.modes.threads:
            torch.set_num_threads(self.modes.threads)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function in a copy of the context variables; what it sets there is discarded."""
        # A copy, since no two threads can run in one contextvars.Context at a time.
        return self._variables.copy().run(function, *args)


class EnteredModes:
    """The modes of another thread, within a ``with`` block."""

    def __init__(self, modes: Modes, nested: bool, settings: SavedSettings) -> None:
        self.modes = modes
        # guard: nesting of autocast
        self.nested = nested
        self.settings = settings

    def __enter__(self) -> None:
        # If this thread has the same modes, `settings.modes` is the same object, and `differs` is
        # False. The grad mode may be another even then: it is off in backward, and set below.
        self.differs = self.settings.modes is not self.modes
        self.guard: Any = None
        if self.differs:
            # guard: modes of backward
            _pop_all()
            if self.settings.modes.inference != self.modes.inference:
                self.guard = torch.inference_mode(self.modes.inference)
                self.guard.__enter__()
            if self.nested:
                # With one level of autocast more, a layer's autocast block is an inner one, and its
                # end does not clear the cache of cast weights.
                torch.autocast_increment_nesting()
            _set_values(self.modes, self.settings.modes)
        if self.differs or self.settings.grad != self.modes.grad:
            _torch.set_grad(self.modes.grad)
        if self.differs:
            # guard: modes of a recomputation
            _push(self.modes)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            leave_checkpoints(error, self.settings.handled)
        if self.differs:
            _pop_all()
            if self.nested:
                leave_autocast()
            if self.guard is not None:
                self.guard.__exit__(None, None, None)
            _set_values(self.settings.modes, self.modes)
        # The grad mode is always put back, since layers may have changed it.
        _torch.set_grad(self.settings.grad)
        if self.differs:
            _push(self.settings.modes)


class SavedSettings:
    """The settings of this thread that this package changes, put back if a block raises.

    Args:
        devices: the devices whose current streams may be changed.
        expected: modes that this thread most likely has. To compare them takes less time than to
            collect them.
    """

    __slots__ = (
        *("grad", "handled", "hooks", "interruptible", "modes", "nesting", "streams", "values"),
    )

    def __init__(self, devices: Sequence[torch.device], expected: Modes | None = None) -> None:
        self.grad = torch.is_grad_enabled()
        #: The error that was being handled when the block began, at which leave_checkpoints()
        #: stops; None if no error was.
        self.handled = sys.exc_info()[1]
        #: The modes of this thread before the block, but for the grad mode, which `grad` has.
        self.modes = expected if expected and expected.are_current() else Modes.current()
        # Ctrl-C interrupts only the main thread, so other threads need not save what follows.
        self.interruptible = get_ident() == main_thread().ident
        if self.interruptible:
            self.hooks = current_hooks()
            self.values = saved()
            self.streams = current_streams(devices)
            # A thread with the expected modes enters no others. So the nesting of autocast stays as
            # it is, and need not be put back.
            self.nesting = autocast_nesting() if self.modes is not expected else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            leave_checkpoints(error, self.handled)
            if self.interruptible:
                self._put_back()

    def _put_back(self) -> None:
        while current_hooks() not in (None, self.hooks):
            _torch.pop_hooks()
        if not self.modes.are_current():
            _pop_all()
            _set_values(self.modes, Modes.current())
            _push(self.modes)
        torch.set_grad_enabled(self.grad)
        while self.nesting is not None and autocast_nesting() > self.nesting:
            leave_autocast()
        put_back(self.values)
        set_streams(self.streams)


def autocast_nesting() -> int:
    """The number of blocks of autocast that this thread is in, one within the other."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def leave_autocast() -> None:
    """Leave the innermost block of autocast."""
    if torch.autocast_decrement_nesting() == 0:
        # That was the outermost block. Weights may change after it, and make cached casts wrong.
        torch.clear_autocast_cache()


def _set_values(modes: Modes, before: Modes) -> None:
    """Set the modes that are plain values, where they may differ from ``before``."""
    # multithreading is set even if `before` has the same value: entering or leaving inference mode
    # changes it.
    torch.autograd.set_multithreading_enabled(modes.multithreading)
    if modes.threads != before.threads:
        # guard: threads of an operator
        torch.set_num_threads(modes.threads)
    torch.set_autocast_cache_enabled(modes.cache)
    for wanted, current in zip(modes.autocast, before.autocast):
        if wanted != current:
            torch.set_autocast_enabled(wanted.kind, wanted.enabled)
            torch.set_autocast_dtype(wanted.kind, wanted.dtype)


def _push(modes: Modes) -> None:
    """Push torch-function modes and dispatch modes onto their stacks.

    They are pushed and not entered, since some reset themselves on entry, as counters do.
    """
    for function in modes.functions:
        _torch.push_function_mode(function)
    for dispatch in modes.dispatch:
        _torch.push_dispatch_mode(dispatch)


def _pop_all() -> None:
    """Pop all torch-function modes and dispatch modes off their stacks."""
    for _ in range(_torch.count_dispatch_modes()):
        _torch.pop_dispatch_mode(None)
    for _ in range(_torch.count_function_modes()):
        _torch.pop_function_mode()
