"""The loss of a step whose gradients are there already, as a function that autograd can run.

A schedule that interleaves forward and backward computes gradients during the call. Gradients are
linear in the loss. So backward has only to multiply them by the gradient of the loss, and to hand
them over to the tensors that they belong to::

    weights on device 0 ── HandOver ── 0 ┐
    weights on device 1 ── HandOver ── 0 ┼─ Outcome ── loss
                                 value ──┘

There is one :class:`HandOver` for each device, whose output is a zero on that device. So autograd
runs each on the caller's stream of its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchgpipe import _torch
from torchgpipe._torch.dynamo import is_alone, uncompiled
from torchgpipe.devices.streams import CPU, AbstractStream, record_stream
from torchgpipe.values.managers import contextmanager

__all__: list[str] = []


#: The least size of a gradient that is added as soon as it is there, in bytes.
LARGE = 2**18


class Sums:
    """The gradients of some tensors on one device, summed up over micro-batches.

    Sums are computed in place. The first gradient of a tensor may share its memory with another
    one, as those of the two terms of an addition do. So it becomes a sum only if nothing else holds
    its memory when the next gradient comes.
    """

    def __init__(self) -> None:
        #: The tensors, by identity.
        self.tensors: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        #: The tensors whose sum has memory of its own, which may be changed in place.
        self._own: set[int] = set()
        #: The hooks of tensors whose gradients are added at once.
        self._hooks: dict[int, Any] = {}

    def add(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of some tensors; None adds nothing."""
        sums, terms = [], []
        for tensor, grad in zip(tensors, grads):
            key = id(tensor)
            found = self._sums.get(key)
            # One that was added as soon as it was there is the sum.
            # guard: sums instead of gradients
            if grad is None or grad is found:
                continue
            self.tensors[key] = tensor
            if found is None:
                # Detached, so that it can be seen whether the gradient's memory is still shared.
                self._sums[key] = grad.detach()
                continue
            # guard: sums of what is not ours
            if key not in self._own and is_alone(found):
                self._own.add(key)
            if key in self._own:
                if grad.is_sparse:
                    found += grad
                else:
                    sums.append(found)
                    terms.append(grad)
            else:
                # One by one, so that the memory of the two terms is free for the next sum.
                self._sums[key] = found + grad
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

        Args:
            tensors: those whose gradients no other thread computes.
        """
        found = [x for x in tensors if type(x) in (Tensor, Parameter) and x.is_leaf]
        large = [x for x in found if x.nbytes >= LARGE]
        for x in found if large and large[0].device == CPU else large:
            self._hooks[id(x)] = x.register_hook(partial(self._add_at_once, x))
        try:
            yield
        finally:
            while self._hooks:
                self._hooks.popitem()[1].remove()

    def _add_at_once(self, tensor: Tensor, grad: Tensor) -> Tensor | None:
        """Add a gradient, and have backward return the sum instead, so that it can be freed."""
        key = id(tensor)
        if key not in self._sums or grad.is_sparse:
            return None
        self.add([tensor], [grad])
        found = self._sums[key]
        if key in self._own:
            # From now on without Python: this adds in place, and returns the sum.
            self._hooks[key].hooks_dict_ref()[self._hooks[key].id] = found.add_
        return found

    def take(self, tensor: Tensor) -> Tensor:
        """Remove a tensor's sum, and return it in memory of its own; zeros if there is none."""
        key = id(tensor)
        found = self._sums.pop(key, None)
        if found is None:
            return torch.zeros_like(tensor)
        return found if key in self._own else found.clone()

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
        own = [self._sums[key] for key in self._sums if key in self._own]
        # The factor of an accelerator is not read, for which the host would wait.
        if own and not (factor.device == CPU and factor == 1):
            _torch.multiply_each(own, factor)
        del own
        for key in self._sums:
            if key not in self._own:
                self._sums[key] = self._sums[key] * factor
        found = [self._sums.pop(id(tensor), None) for tensor in tensors]
        self._sums.clear()
        return found


class HandOver(torch.autograd.Function):
    """``sums, device, dtype, caller, *tensors → 0``: backward hands the gradients over.

    Args:
        sums: the gradients, whose memory belongs to the current stream.
        device: the device of the output.
        dtype: its dtype.
        caller: the caller's stream on that device.
        *tensors: the tensors that get the gradients.
    """

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
        # Not saved for backward, since the caller may change weights in place before it.
        ctx.tensors = tensors
        return torch.zeros((), device=device, dtype=dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, ctx.tensors = ctx.tensors, ()
        found = ctx.sums.scaled(tensors, grad)
        for x in found:
            if x is not None:
                # guard: recording what is handed over
                record_stream(x, ctx.caller)
        return (None, None, None, None, *found)


class Outcome(torch.autograd.Function):
    """``value, divisor, *zeros → value``.

    Args:
        value: the value of the loss.
        divisor: what the gradients have to be divided by, of shape ``()``, or None.
        *zeros: the outputs of :class:`HandOver`.
    """

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
        found = [grad.to(x, non_blocking=x.type != "cpu") for x in ctx.devices]
        return (None, None, *found)
