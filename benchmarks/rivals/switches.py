"""Switches for the four parts of the method, to see what each of them brings.

dependency
    Fork and join, which hold backward to the order of the schedule, and which make a recomputation
    begin before its gradient comes.
streams
    Copy streams. Without them, copies run on the compute streams.
portals
    Skips that go straight from device to device. Without portals, each partition between hands a
    skip on (:mod:`benchmarks.rivals.carried`).
lanes
    Copies and forks that belong to copy streams in autograd's eyes. Without lanes they belong to
    the compute streams, as in torchgpipe 0.0.7, and autograd makes compute streams wait for each
    other.

Portals are switched off outside of the package. The three other parts go through a seam of the
engine, :class:`torchgpipe.engine.stages.Method`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.carried import carried
from torchgpipe import GPipe
from torchgpipe.autograd.copy import Copy, copy, hand_over
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.engine.stages import Method

__all__ = ["PARTS", "switched_off"]

PARTS = ("dependency", "streams", "portals", "lanes")

#: The compute stream of the partition that each lane belongs to, while lanes are switched off.
_compute: dict[AbstractStream, AbstractStream] = {}


@contextmanager
def switched_off(parts: Collection[str]) -> Iterator[Callable[..., GPipe]]:
    """Switch parts off within a ``with`` block, for wrappers that are made in it.

    Yields:
        A function that wraps layers, as the class does.
    """
    method = Method(fence="dependency" not in parts, copy_streams="streams" not in parts)
    if "lanes" in parts:
        method = Method(method.fence, method.copy_streams, compute_stream, copy_for_compute)

    def wrap(layers: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
        if "portals" in parts:
            layers, balance = carried(layers, balance), [1] * len(balance)
        model = GPipe(layers, balance, **options)
        model._stages.method = method
        return model

    yield wrap
    _compute.clear()


def compute_stream(lane: AbstractStream, compute: AbstractStream) -> AbstractStream:
    """The compute stream, as the owner of a lane's copies and forks."""
    _compute[lane] = compute
    return compute


def copy_for_compute(
    prev_stream: AbstractStream,
    next_stream: AbstractStream,
    *tensors: Tensor,
    phonies: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Copy on a lane, by an autograd function that belongs to the compute stream."""
    if not needs_backward(tensors):
        with use_stream(next_stream):
            return copy(prev_stream, next_stream, *tensors)
    copies: tuple[Tensor, ...] = CopyForCompute.apply(
        prev_stream, next_stream, len(phonies), *phonies, *tensors
    )
    return copies


class CopyForCompute(torch.autograd.Function):
    """Copy tensors: ``prev_stream, next_stream, count, *phonies, *tensors → *tensors``.

    Autograd makes compute streams wait for each other then, and this class makes lanes and compute
    streams wait for each other, as torchgpipe 0.0.7 does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        with use_stream(next_stream):
            return Copy.forward(ctx, prev_stream, next_stream, count, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, target = ctx.next_stream, ctx.prev_stream
        hand_over(_defined(grads), _compute.get(source, source), source)
        with use_stream(source):
            found = Copy.backward(ctx, *grads)
        hand_over(_defined(found), target, _compute.get(target, target))
        return found


def _defined(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """All gradients that are not None."""
    return [gradient for gradient in gradients if gradient is not None]
