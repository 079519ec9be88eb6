"""Functions of PyTorch, by what they do with their arguments: for code that a mode watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.devices.streams import canonical_device

__all__: list[str] = []

#: A function that returns a value, copied to a device if it is a tensor of another accelerator.
Move: TypeAlias = Callable[[Any, torch.device], Any]


#: Functions whose second and third arguments are running statistics, which they may update.
STATISTICS = frozenset({"batch_norm", "instance_norm"})


@cache
def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def changed_argument(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument that a call of a function changes; None without one."""
    if name in STATISTICS:
        return args[1:3] or [kwargs.get("running_mean"), kwargs.get("running_var")]
    if is_in_place(name) or kwargs.get("inplace"):
        return args[0] if args else kwargs.get("input")
    return kwargs.get("out")


#: Functions that a recomputation must not call again: they set an attribute, or run backward.
ONCE = frozenset({"__set__", "grad", "backward"})

#: Functions that take tensors of several devices, since they read no values, or treat each tensor
#: alone: ``Glue`` and ``Foreign`` copy no tensors for them.
APART = frozenset({"expand_as", "view_as", "reshape_as", "is_same_size", "is_set_to", "grad"})
APART |= {"result_type", "can_cast", "broadcast_tensors"}


def _to(move: Move, tensor: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    target = kwargs.get("device", kwargs.get("tensor", args[0] if args else None))
    if isinstance(target, Tensor):
        target = target.device
    if isinstance(target, torch.device | str | int) and not isinstance(target, bool):
        tensor = move(tensor, canonical_device(target))
    return tensor, *args


def _cuda(move: Move, tensor: Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    target = args[0] if args else kwargs.get("device")
    device = canonical_device("cuda" if target is None else target)
    return move(tensor, device), *args


def _type_as(move: Move, tensor: Tensor, other: Tensor) -> tuple[Any, ...]:
    return move(tensor, other.device), other


def _as_tensor(move: Move, data: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if target is not None:
        data = move(data, canonical_device(target))
    return data, *args


#: For each function that copies a tensor to a device: a function that has a ``Move`` copy the
#: tensor beforehand, and returns the call's positional arguments with the copy.
TARGETS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.type_as: _type_as,
    torch.as_tensor: _as_tensor,
}
