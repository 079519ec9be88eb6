"""Glue: the model's own code between its mapped modules, and the copies that it makes.

Such code moves tensors between devices: labels to the device of the logits, a mask to that of the
scores. On accelerators PyTorch's copy makes the current streams of both devices wait for each
other, so it would hold back all micro-batches that come after. While glue runs, this mode brings
the tensor over on lanes first, and the copy finds it there.

Such code may also use tensors of several devices together, as ``x + block(x)`` does. They are
copied to the device among theirs that the model has visited last, since the model goes on there. A
tensor that is changed in place stays on its device, and the others are copied to it.

Within mapped modules the mode is off: see :class:`~torchgpipe.mapped.body.inside`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import has_streams
from torchgpipe.mapped.containers import replaced, tensors_of
from torchgpipe.mapped.course import Course
from torchgpipe.mapped.functions import APART, STATISTICS, TARGETS, changed_argument, is_in_place

__all__: list[str] = []


class Glue(TorchFunctionMode):
    """Bring tensors to other devices on lanes."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self._course = course

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        name = getattr(func, "__name__", "")
        if name in ATTRIBUTES:
            return self._moved(func, args, kwargs)
        # Collected once for all checks below, since a step may call thousands of functions.
        tensors = tensors_of(args) + tensors_of(kwargs) if kwargs else tensors_of(args)
        target, step = changed_argument(name, args, kwargs), self._course.step
        changed = [] if target is None else tensors_of(target)
        # Functions with running statistics (STATISTICS) are let through: their call does not tell
        # whether it changes these buffers.
        if changed and step.is_spread and name not in STATISTICS and step.has_state(changed):
            raise RuntimeError(
                "code between the modules of a map of several devices must not change parameters "
                "or buffers, which other micro-batches use at the same time (function: "
                f"{name}, line: {_line()}); move that code into a module of the map, or have it "
                "run once per mini-batch (torchgpipe.OncePerMiniBatch)"
            )
        return self._together(func, name, args, kwargs, tensors, changed)

    def _together(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        changed: Sequence[Tensor],
    ) -> Any:
        """Call a function with its tensors on one device."""
        brought: dict[int, Tensor] = {}
        if (
            len(tensors) > 1
            and len({x.device for x in tensors}) > 1
            and not (func in TARGETS or name in APART or name.startswith("_foreach_"))
        ):
            brought = self._course.cells.together(tensors, changed[0].device if changed else None)
        if not brought:
            return self._called(func, args, kwargs)
        versions = [(x, version_of(x)) for x in brought.values()]
        arguments = replaced((args, dict(kwargs)), brought)
        result = self._called(func, *arguments)
        # guard: changes that would be lost
        if any(version_of(x) != version for x, version in versions):
            raise _apart(name, tensors, "changes one of another device in place")
        return result

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            if self._course.cells.later:
                # guard: code of a later visit
                return self._later(func, args, kwargs)
            return self._moved(func, args, kwargs)
        except RuntimeError as error:
            tensors = tensors_of((args, kwargs))
            if len({x.device for x in tensors}) < 2 or "device" not in str(error):
                raise
            raise _apart(func.__name__, tensors, "has them on several devices") from error

    def _moved(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        # guard: copies of the model itself
        wanted = TARGETS.get(func)
        if wanted is not None:
            args = wanted(self.arrived, *args, **kwargs)
        tail = self._course.tail
        return func(*args, **kwargs) if tail is None else tail.call(func, args, kwargs)

    def _later(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function when the micro-batch has come to a device again.

        Tensors that were made in an earlier visit belong to the stream of that visit, and are
        handed over to the stream of this one.
        """
        aliases: dict[int, Tensor] = {}
        tensors = tensors_of((args, kwargs))
        for device, cell in self._course.cells.later.items():
            aliases |= cell.taken_over([x for x in tensors if x.device == device])
        if not aliases:
            result = self._moved(func, args, kwargs)
        # Functions of torch.nn.functional pass ``inplace`` to this mode as a keyword.
        # guard: functions that are told to change in place
        elif is_in_place(func.__name__) or kwargs.get("inplace"):
            result = self._changed(func, args, kwargs, aliases)
        else:
            arguments = replaced((args, dict(kwargs)), aliases)
            result = self._moved(func, *arguments)
            if any(_torch.is_alias_of(x, y) for x in tensors_of(result) for y in aliases.values()):
                # The model may change this view in place, which autograd would record for the alias
                # alone. So the function is called again, for a view of the original tensor.
                return self._moved(func, args, kwargs)
        for device, cell in self._course.cells.later.items():
            cell.made([x for x in tensors_of(result) if x.device == device])
        return result

    def _changed(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        aliases: Mapping[int, Tensor],
    ) -> Any:
        """Call a function that changes its first argument in place."""
        if not args:
            args, kwargs = (kwargs["input"],), {k: x for k, x in kwargs.items() if k != "input"}
        target, *others = args
        others, named = replaced((others, dict(kwargs)), aliases)
        if id(target) not in aliases or func.__name__ in SHAPES:
            return self._moved(func, (target, *others), named)
        # Backward of a direct change could hand one gradient tensor to two streams: the earlier
        # visit's, and that of the other arguments. So a clone is changed, and copied to the target.
        # guard: changes of what an earlier visit has made
        clone = aliases[id(target)].clone()
        result = self._moved(func, (clone, *others), named)
        target.copy_(clone)
        return target if result is clone else result

    def arrived(self, tensor: Any, device: torch.device) -> Any:
        """The tensor on the device, if both are accelerators; anything else as it is."""
        if not isinstance(tensor, Tensor) or tensor.device == device:
            return tensor
        if not (has_streams(device) and has_streams(tensor.device)):
            return tensor
        return self._course.cells.move(tensor, device)


#: Functions about tensor objects, not their values: they take tensors of any devices as they are.
ATTRIBUTES = frozenset({"__get__", "__set__", "register_hook", "retain_grad", "backward"})
ATTRIBUTES |= {"register_post_accumulate_grad_hook", "requires_grad_", "record_stream"}

#: Functions that change a tensor's shape, storage or graph. ``Glue`` calls them for the tensor
#: itself: such a change of a clone could not be copied back to the tensor.
SHAPES = frozenset({"detach_", "resize_", "resize_as_", "set_", "squeeze_", "unsqueeze_", "t_"})
SHAPES |= {"transpose_", "swapaxes_", "swapdims_", "as_strided_", "share_memory_", "rename_"}


def _apart(name: str, tensors: Iterable[Tensor], what: str) -> RuntimeError:
    devices = ", ".join(dict.fromkeys(str(x.device) for x in tensors))
    return RuntimeError(
        "code between the modules of a device map must have its tensors where they can be brought "
        f"together, and here it {what} (function: {name}, line: {_line()}, devices: {devices}); "
        "move them there by .to(), or put the code into a module of the map (docs/device_map.rst)"
    )


def _line() -> str:
    """The line of the model's code that has called a function."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "torchgpipe"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"
