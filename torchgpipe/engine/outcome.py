"""The outcome of a step: its loss, with the sums of gradients that its backward hands over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from torchgpipe import _torch
from torchgpipe._torch.attributes import is_alone, modules_of, parameters_of
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.autograd.nodes import without_hooks
from torchgpipe.devices.streams import (
    CPU,
    AbstractStream,
    current_stream,
    record_all,
    use_stream,
)
from torchgpipe.engine.links import Links, Post
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step_plan import StepPlan
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


# The loss of a step whose gradients are there already, as a function that autograd can run.
#
# A schedule that interleaves forward and backward computes gradients during the call. Gradients
# are linear in the loss. So backward has only to multiply them by the gradient of the loss, and
# to hand them over to the tensors that they belong to::
#
#   weights on stream 0 ── HandOver ── 0 ┐
#   weights on stream 1 ── HandOver ── 0 ┼─ Outcome ── loss
#                                value ──┘
#
# Each stream that has weights has one :class:`HandOver`, which returns a zero. It is applied with
# that stream current. So autograd runs its backward on the stream that has computed the sums.


#: The size in bytes of a weight from which :meth:`Sums.adding_at_once` adds each gradient of the
#: weight to its sum at once, and not at the end of the stage's backward.
LARGE = 2**18


class Sums:
    """The gradients of some tensors on one device, summed up over micro-batches.

    Sums are computed in place. The first gradient of a tensor may share its memory with another
    one, as those of the two terms of an addition do. So it becomes a sum only if nothing else holds
    its memory when the next gradient comes.
    """

    def __init__(self) -> None:
        #: For the ``id()`` of each tensor that has got a gradient, the tensor.
        self.tensors: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        #: The ``id()`` of each tensor whose sum has its own memory, and may be changed in place.
        self._own: set[int] = set()
        #: By ``id()``, the tensors that ready() will give a hook that adds gradients to their sums.
        self._waiting: dict[int, Tensor] = {}
        #: For each hook of ready(), the dict that holds the hook, and its key there, to remove it.
        self._hooks: list[tuple[dict[int, Any], int]] = []

    def add(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of some tensors; None adds nothing."""
        sums, terms = [], []
        for tensor, grad in zip(tensors, grads):
            key = id(tensor)
            total = self._sums.get(key)
            # If a hook has added the gradient already, backward returns the sum, which is skipped.
            # guard: sums instead of gradients
            if grad is None or grad is total:
                continue
            self.tensors[key] = tensor
            if total is None:
                # The memory of grad has two users as long as anybody else holds grad: grad itself,
                # and the detached tensor. From their number is_alone() tells whether the sum may be
                # changed in place.
                self._sums[key] = grad.detach()
                continue
            # guard: sums of what is not ours
            if key not in self._own and is_alone(total):
                self._own.add(key)
            if key in self._own:
                if grad.is_sparse:
                    total += grad
                else:
                    sums.append(total)
                    terms.append(grad)
            else:
                # One sum at a time, so that the memory of its terms is free for the next one.
                self._sums[key] = total + grad
                if not self._sums[key].is_sparse:
                    self._own.add(key)
        if sums:
            _torch.add_each(sums, terms)

    @contextmanager
    def adding_at_once(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Add gradients as soon as backward has computed them, within a ``with`` block.

        Otherwise the gradients of all weights of a stage are in memory at the end of its backward,
        beside their sums. Small ones wait, since one call that adds them all costs less than many.
        But on the CPU, they do not wait: a small one that stays in memory beside a freed large one
        would fragment it, and leave no room for the next large one.
        """
        leaves = [x for x in tensors if type(x) in (Tensor, Parameter) and x.is_leaf]
        large = [x for x in leaves if x.nbytes >= LARGE]
        chosen = leaves if large and large[0].device == CPU else large
        self._waiting = {id(x): x for x in chosen}
        try:
            yield
        finally:
            self._waiting.clear()
            while self._hooks:
                table, key = self._hooks.pop()
                table.pop(key, None)

    def ready(self) -> None:
        """Have the next backward add gradients to the sums that there are, and return these."""
        if not self._waiting:
            return
        for key in [*self._waiting.keys() & self._sums.keys()]:
            tensor, total = self._waiting.pop(key), self._sums[key]
            if is_alone(total):
                self._own.add(key)
            # add_() runs no Python code, for which the threads of backward would have to queue.
            add = total.add_ if key in self._own else partial(self._add_at_once, tensor)
            handle: Any = tensor.register_hook(add)
            self._hooks.append((handle.hooks_dict_ref(), handle.id))

    def _add_at_once(self, tensor: Tensor, grad: Tensor) -> Tensor | None:
        if grad.is_sparse:
            return None
        self.add([tensor], [grad])
        return self._sums[id(tensor)]

    def reached(self) -> KeysView[int]:
        """The identities of the tensors that have got a gradient."""
        return self._sums.keys()

    def take(self, tensor: Tensor) -> Tensor:
        """Remove a tensor's sum, and return it in memory of its own; zeros if there is none."""
        key = id(tensor)
        total = self._sums.pop(key, None)
        if total is None:
            return torch.zeros_like(tensor)
        return total if key in self._own else total.clone()

    def move_to(self, others: Mapping[int, Sums]) -> None:
        """Add each gradient to the sums of its tensor, by identity, and release it."""
        for key in [*self._sums]:
            tensor = self.tensors[key]
            other, grad = others[key], self._sums.pop(key)
            if key in other._sums:
                other.add([tensor], [grad])
                continue
            other.tensors[key], other._sums[key] = tensor, grad
            if key in self._own:
                other._own.add(key)

    def scaled(self, tensors: Sequence[Tensor], factor: Tensor) -> list[Tensor | None]:
        """The gradients, multiplied by a tensor of shape ``()``; this object releases them."""
        in_place = [self._sums[key] for key in self._sums if key in self._own]
        # A factor on an accelerator is not compared with 1, since the host would wait for it.
        if in_place and not (factor.device == CPU and factor == 1):
            _torch.multiply_each(in_place, factor)
        del in_place
        for key in self._sums:
            if key not in self._own:
                self._sums[key] = self._sums[key] * factor
        grads = [self._sums.pop(id(tensor), None) for tensor in tensors]
        self._sums.clear()
        return grads


class HandOver(torch.autograd.Function):
    """``sums, device, dtype, caller, *tensors → 0``: backward hands the gradients over."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: Sums,
        device: torch.device,
        dtype: torch.dtype,
        caller: AbstractStream,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.sums, ctx.caller = sums, caller
        # save_for_backward() would make it an error to change weights in place before backward.
        ctx.tensors = tensors
        return torch.zeros((), device=device, dtype=dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, ctx.tensors = ctx.tensors, ()
        grads = ctx.sums.scaled(tensors, grad)
        # guard: recording what is handed over
        record_all(grads, ctx.caller)
        if current_stream(ctx.caller.device) != ctx.caller:
            # A hook of a weight may put another tensor in .grad, which must be recorded, too.
            _torch.queue_callback(partial(_record_grads, tensors, ctx.caller))
        return (None, None, None, None, *grads)


def _record_grads(tensors: Iterable[Tensor], stream: AbstractStream) -> None:
    """Record the gradients of weights on the caller's stream, at the end of backward."""
    # guard: recording what hooks return
    record_all([x.grad for x in tensors if x.is_leaf], stream)


class Outcome(torch.autograd.Function):
    """``value, divisor, *zeros → value``."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        divisor: Tensor | None,
        *zeros: Tensor,
    ) -> Tensor:
        ctx.divisor, ctx.done = divisor, False
        ctx.devices = [zero.device for zero in zeros]
        return value.clone()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of a scheduled loss are computed during the call, so they have no "
                "graph of their own (create_graph: True); use the loss of a GPipe for gradients "
                "of gradients"
            )
        if _torch.is_batched(grad):
            raise RuntimeError(
                "a scheduled loss hands one gradient over, and no batch of them (is_grads_batched "
                "or vectorize: True); pass False, or use the loss of a GPipe"
            )
        if ctx.done:
            raise RuntimeError(
                "a scheduled loss has handed its gradients over in its first backward, and keeps "
                "no copy (backwards: 2); call it once for each backward, and add losses that share "
                "a backward before it"
            )
        ctx.done = True
        if ctx.divisor is not None:
            grad = grad / ctx.divisor
        factors = [grad.to(x, non_blocking=x.type != "cpu") for x in ctx.devices]
        return (None, None, *factors)


def copies_of_weights(stages: Stages) -> list[dict[Tensor, Tensor]]:
    """Copies, for each stage, of weights that are on the device of another stage.

    Autograd records the copying, so the backward that hands gradients over goes on to the weights.
    """
    copies: dict[tuple[Tensor, torch.device], Tensor] = {}
    by_stage: list[dict[Tensor, Tensor]] = []
    for entries, device in zip(stages.lent, stages.devices):
        of_stage: dict[Tensor, Tensor] = {}
        for x in [table[name] for table, name in entries]:
            if x is not None and x.device != device:
                if (x, device) not in copies:
                    copies[x, device] = x.to(device, non_blocking=True)
                of_stage[x] = copies[x, device]
        by_stage.append(of_stage)
    return by_stage


def in_place_of(copies: Mapping[Tensor, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights, with copies in place of those that have one."""
    return [copies.get(x, x) for x in weights]


class StepSums:
    """The weights of all stages, the tensors of the caller, and the sums of their gradients.

    Cells add the gradients of weights to the sums of their worker. The gradients of the caller's
    tensors come by the post, as those of a stage's input do, and are summed up at the end.
    """

    def __init__(
        self,
        plan: StepPlan,
        modules: Sequence[nn.Module],
        batches: Iterable[Batch],
        copies: Sequence[Mapping[Tensor, Tensor]],
    ) -> None:
        self._plan = plan
        #: For each stage, the weights that require a gradient, a copy standing for a weight on
        #: another device. If the loss is a module, the last stage also has the weights of the loss.
        self.weights: list[list[Tensor]] = [
            [x for x in in_place_of(of_stage, parameters_of(modules_of(module))) if x.requires_grad]
            for module, of_stage in zip(modules, copies)
        ]
        #: For each stage, autograd's nodes of its weights, as far as they are known: the search for
        #: weights of other modules leaves them out, and adds nodes of the stage's weights it finds.
        self.nodes: list[set[Any]] = [{x.grad_fn for x in of_stage} for of_stage in self.weights]
        #: For each micro-batch, the tensors that came from the caller.
        self._inputs = [[*batch] for batch in batches]
        #: The tensors that came from the caller and require a gradient.
        self._inputs_with_grad = [x for x in chain(*self._inputs) if x.requires_grad]
        self._without_hooks = without_hooks([*chain(*self.weights), *self._inputs_with_grad])
        self.by_worker = [Sums() for _ in plan.devices]

    def begin(self, within: ExitStack) -> None:
        """Begin a step; hooks of weights and inputs see nothing until the block ends."""
        within.enter_context(self._without_hooks)
        # Autograd adds to .grad on the stream where the node of the weight was made. Clearing the
        # list frees the nodes that cells have made, so HandOver makes new ones on its own streams.
        within.callback(self.nodes.clear)

    def prepare(self, within: ExitStack) -> None:
        """Prepare for sums, before any backward."""
        for sums, weights in zip(self.by_worker, self._weights_of_one()):
            within.enter_context(sums.adding_at_once(weights))

    def _weights_of_one(self) -> list[list[Tensor]]:
        """For each worker, the weights that no other worker has."""
        tables: list[dict[int, Tensor]] = [{} for _ in self.by_worker]
        for w, weights in zip(self._plan.schedule.placement, self.weights):
            tables[w].update({id(x): x for x in weights})
        count = Counter(chain(*tables))
        # A weight of two workers is left out: its hook would run in the threads of both, and they
        # might change one sum at the same time.
        # guard: sums of weights that workers share
        return [[x for key, x in table.items() if count[key] == 1] for table in tables]

    def add_strays(self, j: int, strays: Sequence[Tensor]) -> None:
        """Add weights of other modules, which the layers of a stage use, to its weights."""
        # guard: hooks of strays
        self._without_hooks.add(strays)
        self.weights[j] += strays

    def zeros(self, links: Links, post: Post, dtype: torch.dtype) -> list[Tensor]:
        """Make zeros whose backward hands the gradients over.

        Tensors without a gradient are left out, since autograd would call their hooks with None.
        """
        of_caller = Sums()
        for i, inputs in enumerate(self._inputs if self._inputs_with_grad else ()):
            for grads in post.receive_grads(-1, i).values():
                of_caller.add(inputs, grads)
        sources = [of_caller, *self.by_worker]
        reached = {*chain(*[source.reached() for source in sources])}
        #: For each stream, the sums of gradients to hand over on it, and the tensors that get them.
        parts: dict[AbstractStream, tuple[Sums, list[Tensor]]] = {}
        owner: dict[int, Sums] = {}
        first = links.outside[0], self._inputs_with_grad
        for stream, some in [first, *zip(links.stage_streams, self.weights)]:
            for x in some:
                if id(x) in reached and id(x) not in owner:
                    # A weight on another device than its stage gets its gradient on its own device.
                    at = stream if x.device == stream.device else current_stream(x.device)
                    if at not in parts:
                        parts[at] = Sums(), []
                    owner[id(x)], tensors = parts[at]
                    tensors.append(x)
        for source in sources:
            source.move_to(owner)
        callers = dict(zip(self._plan.devices, links.outside))
        zeros: list[Any] = []
        for stream, (sums, tensors) in parts.items():
            with use_stream(stream):
                device = stream.device
                caller = callers.get(device, stream)
                zeros.append(HandOver.apply(sums, device, dtype, caller, *tensors))
        return zeros
