"""The end of a step: its loss, whose backward hands the gradients over."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from torchgpipe.autograd.outcome import HandOver, Outcome, Sums
from torchgpipe.devices.streams import AbstractStream, current_stream, use_stream
from torchgpipe.executor.executor import Executor

__all__: list[str] = []


def hand_over(executor: Executor, value: Tensor, divisor: Tensor | None) -> Tensor:
    """Make the loss hand the gradients over in its backward.

    Args:
        executor: the step.
        value: the loss.
        divisor: what its sum was divided by, if by anything.
    """
    links, criterion, inputs = executor.links, executor.criterion, executor.inputs
    #: By stream: the sums, and the tensors that they belong to. A weight stays on its stream.
    sums: dict[AbstractStream, Sums] = {}
    tensors: dict[AbstractStream, dict[int, Tensor]] = {}
    owner: dict[int, Sums] = {}

    def own(stream: AbstractStream, some: Iterable[Tensor]) -> None:
        for x in some:
            if x.requires_grad and id(x) not in owner:
                # A layer may use a weight of another device.
                at = stream if x.device == stream.device else current_stream(x.device)
                owner[id(x)] = sums.setdefault(at, Sums())
                tensors.setdefault(at, {})[id(x)] = x

    own(links.outside[0], chain(*inputs))
    for stream, weights in zip(links.home, executor.weights):
        own(stream, weights)
    for some, found in zip(inputs, executor.input_grads):
        for x, grad in zip(some, found):
            if grad is not None:
                owner[id(x)].add([x], [grad])
    for part in executor.sums:
        part.move_to(owner)
    callers = dict(zip(executor.plan.devices, links.outside))
    zeros = []
    for stream, mine in tensors.items():
        with use_stream(stream):
            device = stream.device
            caller = callers.get(device, stream)
            zero = HandOver.apply(sums[stream], device, value.dtype, caller, *mine.values())
            zeros.append(zero)
    if criterion.scale is not None:
        one = criterion.scale(torch.ones((), device=value.device, dtype=value.dtype))
        divisor = one if divisor is None else divisor * one
    loss: Tensor = Outcome.apply(value, divisor, *zeros)
    return loss
