"""Errors for transforms of ``torch.func``, which workers and backward would silently ignore."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd import forward_ad

from torchgpipe import _torch

__all__: list[str] = []


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
