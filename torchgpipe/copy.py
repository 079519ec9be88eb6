"""Copy and Wait: how a micro-batch gets from one device to the next, on streams of its own.

::

    device j                    device j+1

    compute ──┐
            Wait
    copy      └──── Copy ────┐
                             │    copy
                            Wait
                             └──── compute

In backward the gradient takes the same way back. An autograd function belongs to the stream that
was current when it was applied, and the autograd engine hands gradients over wherever the stream
changes from one function to the next. So :class:`Wait`, which hands tensors over in forward, has
nothing to wait for in backward; :class:`Copy` copies. Wait is to be applied with the compute stream
current, and Copy with the copy stream of the receiving partition current, as everything between
them. Were they all applied on the compute stream, it would wait, in backward, for gradients that it
does not need yet.

What leaves the compute stream leaves as a clone, in either direction, since the compute stream goes
on while the copy is made and may change the original: autograd adds a gradient that several
functions share to the next one *in place* as soon as nobody else on the host holds it, and a layer
may return the same buffer each time. Recording a tensor on a stream only keeps it from being freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.dependency import alias, keep_requires_grad, pass_on
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
    ``next_stream``, are ready for that one. On one device nothing is copied.
    """

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream = prev_stream
        ctx.next_stream = next_stream
        # Detached: to where they are already, tensors "move" by being returned as they are.
        detached = [alias(tensor) for tensor in tensors]
        if get_device(prev_stream) == get_device(next_stream):
            _hand_over(detached, prev_stream, next_stream)
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
        outputs = _leave(tensors, prev_stream, next_stream)
        _hand_over(outputs, prev_stream, next_stream)
        return pass_on(ctx, tuple(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        left = _leave(grads, ctx.next_stream, ctx.prev_stream)
        for grad in left:
            if grad is not None:
                # The engine records on no stream what comes from a device without streams.
                record_stream(grad, ctx.prev_stream)
        return (None, None, *left)


def _move(
    tensors: Sequence[Any], prev_stream: AbstractStream, next_stream: AbstractStream
) -> list[Any]:
    device = get_device(next_stream)
    # The host reads what is on the CPU, and writes it, without waiting for any stream.
    non_blocking = "cpu" not in (get_device(prev_stream).type, device.type)
    # A copy between two devices is ordered after, and before, the current streams of both.
    with use_stream(prev_stream), use_stream(next_stream):
        return [x if x is None else x.to(device, non_blocking=non_blocking) for x in tensors]


def _leave(
    tensors: Sequence[Any], prev_stream: AbstractStream, next_stream: AbstractStream
) -> Sequence[Any]:
    """Clones what leaves the compute stream, which is current where Wait is applied."""
    if prev_stream == next_stream or prev_stream != current_stream(get_device(prev_stream)):
        return tensors
    return [x if x is None else x.clone() for x in tensors]


def _hand_over(
    tensors: Sequence[Tensor], prev_stream: AbstractStream, next_stream: AbstractStream
) -> None:
    if prev_stream == next_stream:
        # A device without streams: what was issued before is done.
        return
    wait_stream(next_stream, prev_stream)
    for tensor in tensors:
        record_stream(tensor, next_stream)
