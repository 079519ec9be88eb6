"""Functions by which tensors go to other devices, or to several users on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.fork_join import alias, keep_requires_grad, needs_backward, pass_on
from torchgpipe.devices.streams import (
    AbstractStream,
    get_device,
    record_stream,
    use_stream,
    wait_stream,
)

__all__: list[str] = []


# Leave, copy, wait: how a micro-batch gets from one device to the next, on copy streams.
#
# ::
#
#   device j                    device j+1
#
#   compute ──┐
#           leave
#   copy      └──── copy ────┐
#                            │    copy
#                           wait
#                            └──── compute
#
# In backward the gradient takes the same way back. Autograd runs the backward of a function on
# the stream that was current when the function was applied, and makes streams wait for each other
# wherever a gradient passes from one stream to another. So no function here makes a stream wait in
# backward: :class:`Copy` copies, and :class:`Wait` clones. Call :func:`leave` and :func:`wait`
# with the compute stream current, and :func:`copy` with the copy stream of the receiving
# partition current. If all three were called on compute streams, these would wait, in backward,
# for gradients that their next computation does not need.
#
# In both directions the compute stream clones a tensor before the copy stream copies the clone. The
# compute stream goes on during the copy, and may change the original: autograd adds to a gradient
# *in place* if nothing else on the host refers to the gradient, and a layer may return the same
# buffer each time. ``record_stream()`` does not help, since it only keeps memory from being reused.


def leave(
    prev_stream: AbstractStream,
    next_stream: AbstractStream,
    *tensors: Tensor,
    clones: dict[int, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Clone tensors on the compute stream, which is the current one, for a copy stream.

    A tensor that leaves for several copy streams is cloned once. Autograd adds its gradients from
    these on the compute stream, to which the clone belongs. The clones so far are found by the
    identities of their originals.
    """
    if prev_stream == next_stream:
        return tensors
    if clones is None:
        clones = {}
    for tensor in tensors:
        # guard: one clone
        if id(tensor) not in clones:
            # guard: clone in forward
            clones[id(tensor)] = tensor.clone()
    leaving = tuple([clones[id(tensor)] for tensor in tensors])
    # guard: hand-over in leaving
    hand_over(leaving, prev_stream, next_stream)
    return leaving


def copy(
    prev_stream: AbstractStream,
    next_stream: AbstractStream,
    *tensors: Tensor,
    phonies: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Copy tensors from one copy stream to another, which is the current one.

    The tensors have to be ready for ``prev_stream``. The copies are on the device of
    ``next_stream``, and ready for that. On one device nothing is copied.

    Backward runs the nodes that the phonies were branched off after the nodes that these tensors
    go to.
    """
    if not needs_backward(tensors):
        return _copied(tensors, prev_stream, next_stream)
    copies: tuple[Tensor, ...] = Copy.apply(
        prev_stream, next_stream, len(phonies), *phonies, *tensors
    )
    return copies


def wait(
    prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Make the compute stream, which is the current one, wait for what a copy stream brings."""
    # guard: hand-over by Wait
    hand_over(tensors, prev_stream, next_stream)
    if not needs_backward(tensors):
        return tensors
    arrived: tuple[Tensor, ...] = Wait.apply(prev_stream, next_stream, *tensors)
    return arrived


class Copy(torch.autograd.Function):
    """Copy tensors: ``prev_stream, next_stream, count, *phonies, *tensors → *tensors``."""

    @staticmethod
    def forward(
        ctx: Any,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream = prev_stream
        ctx.next_stream = next_stream
        ctx.count = count
        return keep_requires_grad(ctx, _copied(tensors[count:], prev_stream, next_stream))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # guard: target's lane
        gone = moved(grads, ctx.next_stream, ctx.prev_stream, other=ctx.prev_stream)
        return (None, None, None, *[None] * ctx.count, *gone)


class Wait(torch.autograd.Function):
    """Clone gradients, which leave the compute stream: ``prev, next, *tensors → *tensors``."""

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream = prev_stream
        ctx.next_stream = next_stream
        return pass_on(ctx, tensors)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # guard: clone in backward
        return (None, None, *_cloned(grads, ctx.next_stream, ctx.prev_stream))


def _copied(
    tensors: Sequence[Tensor], prev_stream: AbstractStream, next_stream: AbstractStream
) -> tuple[Tensor, ...]:
    if get_device(prev_stream) == get_device(next_stream):
        # On one device .to() returns its argument. Where a function returns its own input, autograd
        # makes a view of the input. Layers can change an alias in place, but no such view.
        tensors = [alias(tensor) for tensor in tensors]
        # guard: hand-over by Copy
        hand_over(tensors, prev_stream, next_stream)
    # guard: source's lane
    return moved(tensors, prev_stream, next_stream, other=prev_stream)


def moved(
    tensors: Sequence[Any],
    prev_stream: AbstractStream,
    next_stream: AbstractStream,
    other: AbstractStream,
) -> tuple[Any, ...]:
    """Copy tensors to the device of the next stream."""
    device = get_device(next_stream)
    # A copy from or to the CPU blocks the host, which uses CPU memory without waiting for streams.
    non_blocking = "cpu" not in (get_device(prev_stream).type, device.type)
    # PyTorch makes a copy wait for the current stream of each of the two devices, and both streams
    # wait for the copy. One of the two copy streams is current already. use_stream() makes the
    # other one current, too, so that no compute stream waits.
    with use_stream(other):
        return tuple([x if x is None else x.to(device, non_blocking=non_blocking) for x in tensors])


def _cloned(
    tensors: Sequence[Any], prev_stream: AbstractStream, next_stream: AbstractStream
) -> tuple[Any, ...]:
    if prev_stream == next_stream:
        return tuple(tensors)
    return tuple([x if x is None else x.clone() for x in tensors])


def hand_over(
    tensors: Sequence[Tensor], prev_stream: AbstractStream, next_stream: AbstractStream
) -> None:
    """Make tensors of one stream ready for another."""
    if prev_stream == next_stream:
        # A stream does its work in order, and need not wait for itself.
        return
    # guard: waiting
    wait_stream(next_stream, prev_stream)
    for tensor in tensors:
        # guard: recording
        record_stream(tensor, next_stream)


# Shared: one tensor for several users, whose gradients are added when all have arrived.
#
# Autograd adds the gradients of a tensor as each arrives, on the stream of the tensor's node. So if
# two devices used one weight, the weight's device would wait for the other device in the middle of
# backward. Instead each user gets an alias. The backward of :class:`Shared` adds the gradients of
# all aliases, once the last of them has arrived.


def shared(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """Make ``count`` aliases of a tensor, which share its memory, as views do."""
    aliases: tuple[Tensor, ...] = Shared.apply(tensor, count)
    return aliases


class Shared(torch.autograd.Function):
    """Share a tensor: ``tensor, count → *tensors``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for _ in range(count)])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:
                # The sum is not computed by +=, since a hook may hold the gradient that it changes.
                # A sparse gradient comes second: PyTorch adds no dense tensor to a sparse one.
                pair = (total, grad) if total is None or not total.is_sparse else (grad, total)
                total = grad if pair[0] is None else pair[0] + pair[1]
        return total, None
