"""Interception: a wrapper learns that one of its mapped modules is called.

PyTorch calls a module through an attribute that ``module.compile()`` sets, if it is set. So the
wrapper sets it. All that belongs to the module stays within the call: its own hooks, and compiled
code. Copies and pickles of the module leave the attribute out by themselves, and neither its class
nor its state dict changes. Forward hooks would run within the compiled code, and another
``forward``, as Accelerate sets it, would run within the module's own hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.thread import registered
from torchgpipe.mapped.course import Course
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.glue import Glue, paused
from torchgpipe.mapped.step import Lasting
from torchgpipe.recompute.phase import is_recomputing

__all__: list[str] = []


class Current(threading.local):
    """The course that this thread takes."""

    course: Course | None = None
    glue: Glue | None = None


current = registered(Current())


class Call:
    """A call of a mapped module, in place of the module's own.

    Args:
        mapped: the module.
        inner: the module's own call.
        lasting: tells which thread runs a step.
    """

    def __init__(self, mapped: Mapped, inner: Callable[..., Any], lasting: Lasting) -> None:
        self.mapped = mapped
        self.inner = inner
        self._lasting = lasting

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        course = current.course
        if course is None:
            if self._lasting.thread is not None and not is_recomputing():
                raise RuntimeError(
                    "within a step, the modules of a device map must be called in the thread that "
                    f"called the wrapper (module: {self.mapped.name}); have the model's forward "
                    "call them itself, or call the model outside of a step"
                )
            # Outside of a step, as when the model generates text, or in a second run.
            args, kwargs = _torch.tree_map_only(
                Tensor, partial(_to, self.mapped.device), (args, kwargs)
            )
            return self.inner(*args, **kwargs)
        if course.inside:
            return self.inner(*args, **kwargs)
        with paused(current.glue):
            return course.call(self.mapped, self.inner, args, kwargs)


def _to(device: Any, tensor: Tensor) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def intercept(mapped: Mapped, lasting: Lasting) -> Call:
    """Make calls of a module ours."""
    module: nn.Module = mapped.module
    inner: Any = module._compiled_call_impl
    if isinstance(inner, Call):
        # Of another wrapper around the same module.
        inner = inner.inner
    found = Call(mapped, inner or module._call_impl, lasting)
    module._compiled_call_impl = found
    return found


def is_intercepted(call: Call) -> bool:
    """Whether calls of the module still come here."""
    return call.mapped.module._compiled_call_impl is call
