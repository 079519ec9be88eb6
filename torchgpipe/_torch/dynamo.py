"""PyTorch's compiler: it may compile layers, and nothing of the wrapper around them."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import graph

from torchgpipe import _torch
from torchgpipe._torch.attributes import modules_of
from torchgpipe._torch.names import has

__all__: list[str] = []


# A wrapper runs threads, and autograd functions that order backward. No compiler may change these.
# So the wrapper's functions are marked as :func:`uncompiled`, and the compiler leaves them to
# Python. For compiled layers, :func:`prepare` changes three settings of the whole process, but only
# once such a layer is about to run in a cell.
#
# The compiler itself is never imported here, since that takes seconds.


Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

#: PyTorch's version as two numbers, such as (2, 13).
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

#: How many graphs of one function :func:`prepare` allows per device: PyTorch's own limit.
GRAPHS = 8

#: The code of each :func:`uncompiled` function, until :func:`mark` has told the compiler of it.
_unmarked: list[CodeType] = []
_marking = threading.Lock()


def uncompiled(function: Function) -> Function:
    """Make the compiler leave a function, and all that it calls, to Python.

    The function stays the same object and takes no longer, which is why this is not
    :func:`torch.compiler.disable`: that imports the compiler, and wraps the function.
    """
    _unmarked.append(function.__code__)
    # mypy does not know the attributes in which the compiler looks whether to leave a function.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "torchgpipe compiles no more than the layers: compile these"
    )
    return function


def uncompiled_before_2_13(function: Function) -> Function:
    """Do as :func:`uncompiled` does, where the compiler fails before PyTorch 2.13."""
    return uncompiled(function) if VERSION < (2, 13) else function


def mark() -> None:
    """Tell the compiler of all functions that are :func:`uncompiled`, before it meets them.

    That is when a model is wrapped: the compiler translates a function before it runs.
    """
    with _marking:
        skip = _torch.FrameAction.SKIP
        strategy = _torch.FrameStrategy(skip, skip)
        while _unmarked:
            _torch.set_code_strategy(_unmarked.pop(), strategy)


def mark_if_possible() -> None:
    """Call :func:`mark`, if this PyTorch has the names that it needs.

    If it has not, nothing is raised here, but only where layers turn out to be compiled.
    """
    if _unmarked and all(map(has, ("set_code_strategy", "FrameStrategy", "FrameAction"))):
        mark()


def prepare_if_compiled() -> None:
    """Prepare for compiled layers if the process has compiled anything.

    Layers may call functions that are compiled, which nobody sees from outside.
    """
    if not _preparation.done and has_compiled():
        prepare()


def has_compiled() -> bool:
    """Whether the process has compiled anything."""
    return "torch._dynamo" in sys.modules and bool(_torch.compiled_codes.seen)


def watch(layers: nn.Module, within_cell: Callable[[], bool]) -> None:
    """Prepare for compiled layers, now if there may be any, else when one is compiled in a cell.

    Args:
        layers: all layers of a wrapper.
        within_cell: whether this thread computes a cell.
    """
    prepare_if_compiled()
    if _preparation.done or "torch._dynamo" not in sys.modules:
        return
    optimized = _torch.OptimizedModule
    compiled = [
        x
        for x in modules_of(layers)
        if x._compiled_call_impl is not None or isinstance(x, optimized)
    ]
    if any(map(is_compiled, compiled)):
        prepare()
        return
    known = vars(_torch).get("compile_callbacks")
    if known is not None and _preparation in known.start_callbacks:
        _preparation.within_cell = within_cell
        return
    if not has("compile_callbacks"):
        return
    # prepare() uses these names. They are looked up here, and not by the callback that calls it:
    # the compiler holds a lock then, and to look a name up may import, and wait for other threads.
    _ = _torch.set_lru_cache, _torch.ensure_guard
    mark_if_possible()
    _preparation.within_cell = within_cell
    # torch.compiler.reset() removes all callbacks. So ours is registered again if it is missing.
    if _preparation not in _torch.compile_callbacks.start_callbacks:
        _torch.compile_callbacks.register_start_callback(_preparation)


class Interception:
    """An object that a wrapper has put in place of the call of a module, compiled or not."""

    compiled: bool

    def __reduce__(self) -> Any:
        """None: a copy of the module, and a pickle, belongs to no wrapper.

        PyTorch leaves the attribute out itself, but where a module is parametrised, or copies all
        of its attributes in its own way.
        """
        return type(None), ()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, on its own."""
    call: Any = module._compiled_call_impl
    if call is None:
        return isinstance(module, _torch.OptimizedModule)
    return call.compiled if isinstance(call, Interception) else True


class _Preparation:
    """Prepare when the compiler starts within a cell, and once."""

    done = False
    within_cell: Callable[[], bool]

    @uncompiled
    def __call__(self, _: object) -> None:
        if not self.done and self.within_cell():
            prepare()


_preparation = _Preparation()


def prepare() -> None:
    """Make the compiler compute the same twice, and in several threads at once.

    Of several graphs that fit, as one for a size and one for any, the compiler takes the one used
    last. A recomputation would save other tensors for backward than the first, if the graph for any
    size was compiled in between. In the order of compilation, which is set here for good, the first
    graph that fits stays the first.

    Each device needs graphs of its own. So the limit of graphs of a function grows with the number
    of accelerators: behind it a recomputation is left to Python, whose forward had a graph.

    And what the compiler makes for backward enters the context variables of the caller of backward.
    Some versions of PyTorch enter them in all threads of autograd at once, which Python refuses;
    with this, each thread enters a copy. Which versions do so shows when they use the context:
    where PyTorch copies it first, the exchange ends.
    """
    mark()
    if _preparation.done:
        return
    keep_guard()
    _torch.set_lru_cache(False)
    config, count = _torch.compiler_config, torch.accelerator.device_count()
    config.recompile_limit = max(config.recompile_limit, GRAPHS * count)
    if hasattr(graph, "contextvars"):
        graph.contextvars = _copied
    _preparation.done = True


class _Context:
    """A context that can be entered while it is entered."""

    @uncompiled
    def __init__(self) -> None:
        self._context = contextvars.copy_context()

    @uncompiled
    def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function in a copy of the context."""
        return self._context.copy().run(function, *args, **kwargs)

    @uncompiled
    def copy(self) -> contextvars.Context:
        """A context like it, which can be entered once; PyTorch needs no stand-in any more."""
        graph.contextvars = contextvars  # type: ignore[attr-defined]
        return self._context.copy()


#: What :func:`prepare` puts in place of the module contextvars in torch.autograd.graph. Its
#: copy_context() returns a _Context, which several threads may enter at once.
_copied = SimpleNamespace(**{**vars(contextvars), "copy_context": _Context})


# The guard of CUDA devices: PyTorch's object in C++ that switches between them.
#
# If PyTorch is built for CUDA and there is no GPU, the first thread that enters a mode of fake
# tensors registers a guard that does nothing, for the whole process. PyTorch (2.11) frees it when
# that thread ends, and goes on using it. So a thread that never ends has to be the first.


@cache
def keep_guard() -> None:
    """Have a thread that never ends register the guard, before this one traces or compiles."""
    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    ensure, registered = _torch.ensure_guard, threading.Event()

    def hold() -> None:
        try:
            ensure()
        finally:
            registered.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="guard of CUDA devices", daemon=True).start()
    registered.wait()
