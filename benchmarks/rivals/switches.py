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

Portals are switched off by other layers, and the three other parts by other functions in the
engine, which knows nothing of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.rivals.carried import carried
from torchgpipe import GPipe
from torchgpipe.autograd.copy import Copy, copy, hand_over
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.devices.pool import PartitionStreams, StreamPool
from torchgpipe.devices.streams import AbstractStream, use_stream
from torchgpipe.engine import cell, lanes, step

__all__ = ["PARTS", "switched_off"]

PARTS = ("dependency", "streams", "portals", "lanes")

#: The compute stream of the partition that each lane belongs to, while parts are switched off.
_compute: dict[AbstractStream, AbstractStream] = {}


@contextmanager
def switched_off(parts: Collection[str]) -> Iterator[Callable[..., GPipe]]:
    """Switch parts off within a ``with`` block, for wrappers that are made in it.

    Yields:
        A function that wraps layers, as the class does.
    """
    get = StreamPool.get

    def got(pool: StreamPool, *args: Any, **kwargs: Any) -> list[PartitionStreams]:
        found = get(pool, *args, **kwargs)
        if "streams" in parts:
            found = [x._replace(values=[x[0]] * len(x[1]), skips=[x[0]] * len(x[2])) for x in found]
        _compute.update({lane: x.compute for x in found for lane in (*x.values, *x.skips)})
        return found

    def wrap(layers: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
        if "portals" in parts:
            layers, balance = carried(layers, balance), [1] * len(balance)
        return GPipe(layers, balance, **options)

    with ExitStack() as patched:
        patched.enter_context(patch.object(StreamPool, "get", got))
        if "dependency" in parts:
            patched.enter_context(patch.object(step, "Fence", lambda ahead: None))
        if "lanes" in parts:
            patched.enter_context(patch.object(cell, "use_stream", use_compute_stream))
            patched.enter_context(patch.object(lanes, "copy", copy_for_compute))
        yield wrap
    _compute.clear()


def use_compute_stream(stream: AbstractStream) -> AbstractContextManager[None]:
    """Have copies and forks belong to the compute stream, and not to a lane."""
    return use_stream(_compute.get(stream, stream))


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
