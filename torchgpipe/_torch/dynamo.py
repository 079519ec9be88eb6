"""What PyTorch's compiler must leave alone, and what it must do in the same way twice.

Layers may be compiled, the wrapper is not: it runs threads, and autograd functions with a purpose
of their own. The compiler is not imported here: it asks the code of each function that it meets.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import graph

__all__: list[str] = []

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

#: PyTorch's, as far as it matters here.
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

_AS_PYTHON = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)


def uncompiled(function: Function) -> Function:
    """Has a function, and all that it calls, run as Python where it is called by compiled code.

    What is compiled breaks there. The function itself is the same, and takes no longer.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _AS_PYTHON)
    # Functions have attributes that types do not know.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "torchgpipe compiles no more than the layers: compile these"
    )
    return function


def uncompiled_before_2_13(function: Function) -> Function:
    """Likewise, for what the compiler of PyTorch 2.13 understands, and older ones fail with."""
    return uncompiled(function) if VERSION < (2, 13) else function


def prepare() -> None:
    """Has the compiler compute the same twice, and in several threads at once.

    Of several graphs that fit, as one for a size and one for any, it takes the one used last. A
    second run would save other tensors for backward than the first, if the one for any size was
    compiled in between. In the order in which they were compiled, which is what is set here for
    good, the first that fits stays the first.

    And what it compiles for backward enters the context variables that the caller of backward had.
    PyTorch 2.12 and 2.13 enter them in all threads of autograd at once, which Python refuses; here
    each enters a copy.
    """
    # Not in PyTorch 2.9.
    set_lru_cache = getattr(eval_frame, "_set_lru_cache", None)
    if set_lru_cache is not None:
        set_lru_cache(False)
    if (2, 12) <= VERSION < (2, 14):
        # Types take it for the module that it was.
        graph.contextvars = _Copied  # type: ignore[attr-defined, assignment]


class _Copied:
    """What autograd sees of contextvars."""

    class copy_context:
        """A context that can be entered while it is entered."""

        @uncompiled
        def __init__(self) -> None:
            self._context = contextvars.copy_context()

        @uncompiled
        def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
            """Calls a function in a copy of it."""
            return self._context.copy().run(function, *args, **kwargs)

        def copy(self) -> Any:
            """A context like it, which can be entered once."""
            return self._context.copy()
