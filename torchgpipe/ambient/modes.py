"""Modes that change what layers compute: autocast, and the transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchgpipe import _torch
from torchgpipe.ambient.context import Modes, autocast_nesting
from torchgpipe.devices.streams import device_types

__all__: list[str] = []


def is_within_autocast(modes: Modes) -> bool:
    """Whether the caller is in a block of autocast.

    Args:
        modes: the modes of this thread. A thread of autograd is never in a block itself, but has
            the modes of the place where backward was called.
    """
    return autocast_nesting() > 0 or True in [autocast.enabled for autocast in modes.autocast]


def casts_as(modes: Modes) -> bool:
    """Whether the autocast settings of this thread are those of ``modes``."""
    return all(
        torch.is_autocast_enabled(kind) == enabled
        and (not enabled or torch.get_autocast_dtype(kind) == dtype)
        for kind, enabled, dtype in modes.autocast
    )


def is_within_float16() -> bool:
    """Whether autocast computes in float16 here, in which small gradients become zero."""
    kinds = [kind for kind in device_types() if torch.is_autocast_enabled(kind)]
    return any(torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds)


class with_autocast:
    """Compute under autocast, for some types of device alone, within a ``with`` block."""

    def __init__(self, kinds: Collection[str]) -> None:
        self.kinds = kinds

    def __enter__(self) -> None:
        self.other = [
            kind
            for kind in device_types()
            if torch.is_autocast_enabled(kind) != (kind in self.kinds)
        ]
        for kind in self.other:
            torch.set_autocast_enabled(kind, kind in self.kinds)

    def __exit__(self, *_: object) -> None:
        for kind in self.other:
            torch.set_autocast_enabled(kind, kind not in self.kinds)


class without_autocast(with_autocast):
    """Compute without autocast within a ``with`` block, as backward outside of its blocks does."""

    def __init__(self) -> None:
        super().__init__(())


class own_casts:
    """Switch autocast's cache of cast weights off within a ``with`` block.

    Autocast casts a weight once, and caches the result until its outermost block is left. The cache
    finds a cast weight by the weight alone: it ignores the dtype of the cast, and changes of the
    weight since.
    """

    def __enter__(self) -> None:
        self.cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self.cache)


def verify_no_transform() -> None:
    """Check that no transform of :mod:`torch.func` is active, which workers would not see.

    Raises:
        RuntimeError: a transform is active.
    """
    if _torch.transform_level() is not None:
        raise RuntimeError(
            "a wrapped model cannot be called within a torch.func transform (grad, vmap, jvp, "
            "...), since these do not reach its workers and its backward; use "
            "torch.autograd.grad(), with create_graph=True for higher orders, or transform the "
            "plain model (model.module) on one device"
        )


def verify_no_tangents(tensors: Iterable[Tensor]) -> None:
    """Check that none of the tensors has a tangent, which would be lost.

    Raises:
        RuntimeError: a tensor has one.
    """
    if _torch.forward_level() < 0:
        return
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "a wrapped model cannot be differentiated in forward mode (tensor with a tangent: "
                f"{tuple(tensor.shape)}); use torch.autograd.functional.jvp(), which goes "
                "backward twice, or the plain model (model.module) on one device"
            )
