"""The sums of a step's gradients, until backward of its loss hands them over.

Cells leave the gradients of weights here, worker by worker; those of the caller's tensors come by
the post. All of them are summed up over micro-batches, and multiplied by the gradient of the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import modules_of, parameters_of
from torchgpipe.autograd.nodes import without_hooks
from torchgpipe.autograd.outcome import HandOver, Sums
from torchgpipe.devices.streams import AbstractStream, current_stream, use_stream
from torchgpipe.engine.stages import Stages
from torchgpipe.executor.links import Links, Post
from torchgpipe.executor.step_plan import Plan
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


def copies_of_weights(stages: Stages) -> list[dict[Tensor, Tensor]]:
    """Copies, for each stage, of weights that are at home on the device of another one.

    Autograd knows what they are copies of, so their gradients are handed over to that.
    """
    made: dict[tuple[Tensor, torch.device], Tensor] = {}
    found: list[dict[Tensor, Tensor]] = []
    for places, device in zip(stages.lent, stages.devices):
        own: dict[Tensor, Tensor] = {}
        for x in [table[name] for table, name in places]:
            if x is not None and x.device != device:
                if (x, device) not in made:
                    made[x, device] = x.to(device, non_blocking=True)
                own[x] = made[x, device]
        found.append(own)
    return found


def in_place_of(copies: Mapping[Tensor, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights, with copies in place of those that have one."""
    return [copies.get(x, x) for x in weights]


class StepSums:
    """The weights of all stages, the tensors of the caller, and the sums of their gradients.

    Args:
        plan: the plan of the step.
        modules: for each stage, the module that has all of its weights.
        batches: the micro-batches of the first stage.
        copies: for each stage, copies of weights that it computes with in their place.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Sequence[nn.Module],
        batches: Iterable[Batch],
        copies: Sequence[Mapping[Tensor, Tensor]],
    ) -> None:
        self._plan = plan
        #: For each stage, its weights that require a gradient; the last one has those of the loss.
        self.weights: list[list[Tensor]] = [
            [x for x in in_place_of(own, parameters_of(modules_of(module))) if x.requires_grad]
            for module, own in zip(modules, copies)
        ]
        #: For each stage, their nodes in autograd's graph, as far as cells have met them.
        self.nodes: list[set[Any]] = [{x.grad_fn for x in own} for own in self.weights]
        #: For each micro-batch, the tensors that came from the caller.
        self._inputs = [[*batch] for batch in batches]
        given = [x for x in chain(*self._inputs) if x.requires_grad]
        self._without_hooks = without_hooks([*chain(*self.weights), *given])
        #: For each worker, the sums of the gradients of its weights.
        self.by_worker = [Sums() for _ in plan.devices]

    def begin(self, within: ExitStack) -> None:
        """Begin to sum up; hooks of weights and inputs see nothing until the block ends."""
        within.enter_context(self._without_hooks)
        # Whoever hands over makes nodes anew, for streams of its own.
        within.callback(self.nodes.clear)
        for sums, weights in zip(self.by_worker, self._weights_of_one()):
            within.enter_context(sums.adding_at_once(weights))

    def _weights_of_one(self) -> list[list[Tensor]]:
        """For each worker, the weights that no other worker has."""
        found: list[dict[int, Tensor]] = [{} for _ in self.by_worker]
        for w, weights in zip(self._plan.schedule.placement, self.weights):
            found[w].update({id(x): x for x in weights})
        count = Counter(chain(*found))
        # Another worker has a thread of its own.
        # guard: sums of weights that workers share
        return [[x for key, x in own.items() if count[key] == 1] for own in found]

    def met(self, j: int, strays: Sequence[Tensor]) -> None:
        """Take weights that a stage uses, and that are not among its own, for its own."""
        # guard: hooks of strays
        self._without_hooks.add(strays)
        self.weights[j] += strays

    def zeros(self, links: Links, post: Post, dtype: torch.dtype) -> list[Tensor]:
        """Make zeros whose backward hands the gradients over.

        Args:
            links: the streams of the step.
            post: has the gradients of the caller's tensors.
            dtype: the dtype of the loss.
        """
        #: By stream, the sums, and the tensors that they belong to. A weight stays on its stream.
        parts: dict[AbstractStream, tuple[Sums, list[Tensor]]] = {}
        owner: dict[int, Sums] = {}
        first = links.outside[0], chain(*self._inputs)
        for stream, some in [first, *zip(links.home, self.weights)]:
            for x in some:
                if x.requires_grad and id(x) not in owner:
                    # A layer may use a weight of another device.
                    at = stream if x.device == stream.device else current_stream(x.device)
                    if at not in parts:
                        parts[at] = Sums(), []
                    owner[id(x)], tensors = parts[at]
                    tensors.append(x)
        for i, given in enumerate(self._inputs):
            for found in post.receive_grads(-1, i).values():
                for x, grad in zip(given, found):
                    if grad is not None:
                        owner[id(x)].add([x], [grad])
        for part in self.by_worker:
            part.move_to(owner)
        callers = dict(zip(self._plan.devices, links.outside))
        zeros: list[Any] = []
        for stream, (sums, tensors) in parts.items():
            with use_stream(stream):
                device = stream.device
                caller = callers.get(device, stream)
                zeros.append(HandOver.apply(sums, device, dtype, caller, *tensors))
        return zeros
