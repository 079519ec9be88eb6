"""Glue: the model's own code between its mapped modules, and the copies that it makes.

Such code moves tensors between devices: labels to the device of the logits, a mask to that of the
scores. On accelerators PyTorch's copy makes the current streams of both devices wait for each
other, so it would hold back all micro-batches that come behind. While glue runs, this mode brings
the tensor over on lanes first, and the copy finds it there.

Within mapped modules the mode is off. All tensors are on one device there, and a mode takes a
microsecond for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe.devices.streams import canonical_device, has_streams, record_stream
from torchgpipe.mapped.course import Course

__all__: list[str] = []


class Glue(TorchFunctionMode):
    """Bring tensors to other devices on lanes.

    Args:
        course: the course of the micro-batch.
    """

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
        kwargs = kwargs or {}
        if self._course.own_streams:
            self._record(args, kwargs)
        wanted = TARGETS.get(func)
        if wanted is not None:
            args = wanted(self, *args, **kwargs)
        return func(*args, **kwargs)

    def arrived(self, tensor: Any, device: torch.device) -> Any:
        """The tensor on the device, if both are accelerators; anything else as it is."""
        if not isinstance(tensor, Tensor) or tensor.device == device:
            return tensor
        if not (has_streams(device) and has_streams(tensor.device)):
            return tensor
        return self._course.move(tensor, device)

    def _record(self, *arguments: Any) -> None:
        """Keep what an earlier visit of a device has made, while a later one computes with it."""
        for leaf in _torch.tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                stream = self._course.own_streams.get(leaf.device)
                if stream is not None:
                    record_stream(leaf, stream)


def _to(glue: Glue, tensor: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    target = kwargs.get("device", kwargs.get("tensor", args[0] if args else None))
    if isinstance(target, Tensor):
        target = target.device
    if isinstance(target, torch.device | str | int) and not isinstance(target, bool):
        tensor = glue.arrived(tensor, canonical_device(target))
    return tensor, *args


def _cuda(glue: Glue, tensor: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    target = args[0] if args else kwargs.get("device")
    device = canonical_device("cuda" if target is None else target)
    return glue.arrived(tensor, device), *args


def _type_as(glue: Glue, tensor: Tensor, other: Tensor) -> tuple[Any, ...]:
    return glue.arrived(tensor, other.device), other


def _copy_(glue: Glue, tensor: Tensor, source: Tensor, *args: Any, **_: Any) -> tuple[Any, ...]:
    return tensor, glue.arrived(source, tensor.device), *args


def _set(glue: Glue, tensor: Tensor, index: Any, value: Any) -> tuple[Any, ...]:
    return tensor, index, glue.arrived(value, tensor.device)


#: By function, what moves its tensors first: it returns the positional arguments.
TARGETS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.type_as: _type_as,
    Tensor.copy_: _copy_,
    Tensor.__setitem__: _set,
}


class paused:
    """Leave the mode within a ``with`` block, if it is the innermost one."""

    def __init__(self, glue: Glue | None) -> None:
        self._glue = glue

    def __enter__(self) -> None:
        count = _torch.count_function_modes()
        self._popped = bool(count) and _torch.function_mode_at(count - 1) is self._glue
        if self._popped:
            _torch.pop_function_mode()

    def __exit__(self, *_: object) -> None:
        if self._popped:
            _torch.push_function_mode(self._glue)
