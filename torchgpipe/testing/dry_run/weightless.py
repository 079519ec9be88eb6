"""Weightless tensors of the host: large ones are allocated, and nobody writes to them.

A dry run moves a model to devices without reading it. The operating system gives memory only to
pages that are written to, so a model on the host takes none while nobody initialises its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchgpipe import _torch

__all__: list[str] = []

#: Tensors of fewer bytes are real.
LARGE = 2**20

#: Operators that make a tensor of a given size, those that copy one, and those that change the
#: layout of one in place. Any other operator in place writes to its first argument.
FACTORIES = {"rand", "randn", "randint", "zeros", "ones", "full"}
COPIES = {"clone", "_to_copy"}
LAYOUTS = {
    "resize_",
    "as_strided_",
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "set_",
    "detach_",
}


def weightless() -> AbstractContextManager[Any]:
    """Leave out whatever writes to large tensors of the host, within a ``with`` block.

    Its value has ``is_wanted``, which may be made false before the block ends.
    """

    # A private name of PyTorch, which types do not know.
    class Mode(_torch.DispatchMode):  # type: ignore[misc]
        is_wanted = True

        def __torch_dispatch__(
            self,
            func: Any,
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            options = dict(kwargs or {})
            found = None
            if self.is_wanted:
                found = stand_in(func.overloadpacket.__name__, args, options)
            return func(*args, **options) if found is None else found

    mode: AbstractContextManager[Any] = Mode()
    return mode


def stand_in(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """The result of an operator without its values, if it makes or changes a large tensor."""
    if torch.device(options.get("device") or "cpu").type != "cpu":
        return None
    dtype: torch.dtype | None = options.get("dtype")
    if name in FACTORIES:
        size = next((x for x in args if isinstance(x, (list, tuple))), ())
        if dtype is None and name == "full":
            dtype = torch.tensor(args[1]).dtype
        dtype = dtype or (torch.int64 if name == "randint" else torch.get_default_dtype())
        return torch.empty(size, dtype=dtype) if prod(size) * dtype.itemsize >= LARGE else None
    first = args[0] if args else None
    if not isinstance(first, Tensor) or first.device.type != "cpu" or first.nbytes < LARGE:
        return None
    if name in COPIES:
        return torch.empty_like(first, dtype=dtype)
    return first if name.endswith("_") and name not in LAYOUTS else None
