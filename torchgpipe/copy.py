"""Copy and Wait: how a micro-batch gets from one device to the next, on streams of its own.

::

    device j                    device j+1

    compute ──┐
            Wait
    copy      └──── Copy ────┐
                             │    copy
                            Wait
                             └──── compute

Both do in backward what they do in forward, in the opposite direction. :class:`Wait` hands
tensors over from one stream to another of the same device, and has them recorded there. Between
two partitions that share a device, so does :class:`Copy`.

What leaves the compute stream leaves as a clone, since the compute stream goes on while the copy
is made and may change the original: autograd adds a gradient that several functions share to the
next one *in place* as soon as nobody else on the host holds it, and a layer may return the same
buffer each time. Recording a tensor on a stream only keeps it from being freed.

An autograd function belongs to the stream that was current when it was applied: the autograd
engine makes that stream wait for the gradient. So :class:`Copy` is to be applied with the copy
stream of the receiving device current, and :class:`Wait` with the compute stream current. Were
they all applied on the compute stream, it would wait, in backward, for copies that it does not
need yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.dependency import keep_requires_grad, pass_on
from torchgpipe.stream import (
    AbstractStream,
    current_stream,
    get_device,
    record_stream,
    use_stream,
    wait_stream,
)

__all__: list[str] = []

Gradients: TypeAlias = tuple[Tensor | None, ...]


class Copy(torch.autograd.Function):
    """Brings tensors from one lane to another: ``prev_stream, next_stream, *tensors → *tensors``.

    The tensors have to be ready for ``prev_stream``; the copies, on the device of
    ``next_stream``, are ready for that one.
    """

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream = prev_stream
        ctx.next_stream = next_stream
        # Detached: to where they are already, tensors "move" by being returned as they are.
        detached = [tensor.detach() for tensor in tensors]
        return keep_requires_grad(ctx, tuple(_move(detached, prev_stream, next_stream)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        return (None, None, *_move(grads, ctx.next_stream, ctx.prev_stream))


class Wait(torch.autograd.Function):
    """Hands tensors over: ``prev_stream, next_stream, *tensors → *tensors``.

    ``next_stream`` waits for all that ``prev_stream`` was given so far.
    """

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream = prev_stream
        ctx.next_stream = next_stream
        return pass_on(ctx, tuple(_hand_over(tensors, prev_stream, next_stream)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        return (None, None, *_hand_over(grads, ctx.next_stream, ctx.prev_stream))


def _move(
    tensors: Sequence[Any], prev_stream: AbstractStream, next_stream: AbstractStream
) -> Sequence[Any]:
    device = get_device(next_stream)
    if device == get_device(prev_stream):
        return _hand_over(tensors, prev_stream, next_stream)
    # The host reads what is on the CPU, and writes it, without waiting for any stream.
    non_blocking = "cpu" not in (get_device(prev_stream).type, device.type)
    # A copy between two devices is ordered after, and before, the current streams of both.
    with use_stream(prev_stream), use_stream(next_stream):
        return [x if x is None else x.to(device, non_blocking=non_blocking) for x in tensors]


def _hand_over(
    tensors: Sequence[Any], prev_stream: AbstractStream, next_stream: AbstractStream
) -> Sequence[Any]:
    if prev_stream == next_stream:
        # A device without streams: what was issued before is done.
        return tensors
    if prev_stream == current_stream(get_device(prev_stream)):
        # The compute stream, as Wait is applied there.
        tensors = [x if x is None else x.clone() for x in tensors]
    wait_stream(next_stream, prev_stream)
    for tensor in tensors:
        if tensor is not None:
            record_stream(tensor, next_stream)
    return tensors
