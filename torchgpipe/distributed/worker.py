"""A worker: the stages of one process, whose neighbours may be in other processes.

It is the executor of schedules, for a part of a schedule. What the executor would keep for a stage
of another process is packed into a message, and what comes in a message is put where the executor
looks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.messages import Form, pack, unpack
from torchgpipe.distributed.routes import Routes
from torchgpipe.distributed.tied import Tied
from torchgpipe.executor.executor import Executor
from torchgpipe.executor.links import Sent
from torchgpipe.schedule.program import Op
from torchgpipe.values.microbatch import VALUE, Batch, Part

__all__: list[str] = []


class Worker(Executor):
    """One step of the stages of this process.

    Args:
        routes: in which process each stage is.
        tied: the weights of several processes.
        quiet: whether no layer is expected to draw random numbers, as all processes have agreed.
        *args: the arguments of :class:`~torchgpipe.executor.executor.Executor`, for a plan with one
            worker.
    """

    def __init__(self, routes: Routes, tied: Tied, quiet: bool, *args: Any) -> None:
        super().__init__(*args)
        self.routes, self._tied, self.quiet = routes, tied, quiet
        #: The form of what has come to a stage, and of what has left for it, by stage and
        #: micro-batch. Gradients take the same way back.
        self.forms: dict[tuple[int, int], Form] = {}
        self._leaving: dict[tuple[int, int], list[Tensor]] = {}

    def where(self, w: int, op: Op) -> str:
        return f"raised in {op} on rank {self.routes.rank}"

    def met(self, j: int, strays: list[Tensor]) -> None:
        self._tied.verify_here(j, strays)
        super().met(j, strays)

    def leaving(self, j: int, i: int) -> tuple[Form, list[Tensor]]:
        """The message to stage ``j`` from the stage before, which was computed here."""
        return self.forms[j, i], self._leaving.pop((j, i))

    def arrive(
        self,
        j: int,
        i: int,
        form: Form,
        tensors: Sequence[Tensor],
        states: dict[str, Tensor] | None,
    ) -> None:
        """Take what stage ``j`` is sent from the stage before, in another process."""
        if states is not None:
            self.step.numbers.go_on(i, states)
        self.forms[j, i] = form
        parts = unpack(form, tensors)
        value = parts.pop(VALUE)
        batch = Batch(value.structure.unflatten(value.tensors))
        batch.shared |= form.shared & {VALUE}
        self.values[j, i] = batch, None
        shared = form.shared - {VALUE}
        # guard: skips that share memory elsewhere
        self.parcels[i].put(parts, shared)

    def grads_leaving(self, j: int, i: int) -> list[Tensor]:
        """The gradients of what has come to stage ``j``, which go back; zeros where is none."""
        form = self.forms.pop((j, i))
        found = []
        for part in form.parts:
            arrived = self.grads.get((self.routes.source(part.key, j), i), {}).pop(part.key, None)
            grads = arrived.tensors if arrived else [None] * len(part.metas)
            for meta, grad in zip(part.metas, grads):
                if meta.requires_grad:
                    found.append(
                        torch.zeros(meta.shape, dtype=meta.dtype, device=self.plan.devices[0])
                        if grad is None
                        # A function may return the same tensor the next time.
                        else grad.detach()
                    )
        return found

    def grads_arrive(self, j: int, i: int, tensors: Sequence[Tensor]) -> None:
        """Take the gradients of what has left for stage ``j``, in another process."""
        form = self.forms.pop((j, i))
        rest = iter(tensors)
        for part in form.parts:
            grads = tuple([next(rest) if meta.requires_grad else None for meta in part.metas])
            waiting = self.grads.setdefault((self.routes.source(part.key, j), i), {})
            waiting[part.key] = Sent(grads)

    def send(self, j: int, i: int, output: Batch) -> None:
        super().send(j, i, output)
        if not self.routes.is_away(j + 1):
            return
        batch, _ = self.values.pop((j + 1, i))
        parts: dict[Any, Part] = {VALUE: Part(batch.parts[VALUE], batch.structures[VALUE])}
        shared = batch.shared & {VALUE}
        for skip in self.routes.carried[j]:
            parts[skip], is_shared = self.parcels[i].take(skip)
            shared |= {skip} if is_shared else set()
        self.forms[j + 1, i], self._leaving[j + 1, i] = pack(parts, shared)
