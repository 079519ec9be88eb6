"""The post: what each stage of a step is sent, until it receives it.

::

    F of (j, i)   value  ──→ stage j + 1                 B of (j, i)   gradient of each part
                  skips  ──→ the stages that pop them                  ──→ where the part came from

Before the first stage is the caller: the micro-batches come from there, and the gradients of their
tensors go back to it. Stages may be in other processes, too: :mod:`torchgpipe.distributed.mail`
takes what is there for these, and brings what comes from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchgpipe.engine.step import Step
from torchgpipe.executor.cell import Gradients
from torchgpipe.executor.links import Links, Sent
from torchgpipe.skip.parcels import Parcels
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []


class Post:
    """The values, skips and gradients on their way between the stages of one step.

    Args:
        step: the step.
        links: the links that tensors travel on.
        batches: the micro-batches, which this list lets go of; an empty list if the first stage is
            in another process.
    """

    def __init__(self, step: Step, links: Links, batches: list[Batch]) -> None:
        self.step, self._links, self._layout = step, links, step.stages.skip_layout
        #: The values that wait for a stage, with their events, by stage and micro-batch.
        self.values: dict[tuple[int, int], tuple[Batch, Any]] = {
            (0, i): (batch, None) for i, batch in enumerate(batches)
        }
        batches.clear()
        #: For each micro-batch, the skips that were stashed and not popped yet.
        self.parcels: defaultdict[int, Parcels] = defaultdict(Parcels)
        #: The events of skips that come from another worker.
        self._events: dict[tuple[int, Any], Any] = {}
        #: The gradients that wait for a stage, by stage and micro-batch, for each part.
        self.grads: dict[tuple[int, int], dict[Any, Sent]] = {}

    def send(self, j: int, i: int, output: Batch) -> None:
        """Send an output to the next stage, and its skips to those that pop them."""
        targets: dict[Any, int] = {VALUE: j + 1, **self._layout.stashed[j]}
        for key in [*output.parts]:
            output = output.map(partial(self._sent, key, j, targets[key], i), [key])
        value = self.parcels[i].packed(output)
        self.values[j + 1, i] = value, self._events.pop((i, VALUE), None)

    def _sent(self, key: Any, j: int, target: int, i: int, *tensors: Tensor) -> list[Tensor]:
        found = self._links.send([x.detach() for x in tensors], j, target, i)
        self._events[i, key] = found.event
        return [
            # This tells the next cell that a gradient is wanted. No gradient comes here.
            y.requires_grad_(x.requires_grad)
            for x, y in zip(tensors, found.tensors)
            if y is not None
        ]

    def receive(self, j: int, i: int) -> Batch:
        """The micro-batch that waits for a stage, beside the skips that the stage pops."""
        batch, event = self.values.pop((j, i))
        self._links.receive(batch, event, j)
        popped = self._layout.popped[j]
        batch = self.parcels[i].unpacked(batch, popped)
        for skip in popped:
            self._links.receive(batch.parts[skip], self._events.pop((i, skip), None), j)
        return batch

    def send_grads(self, j: int, i: int, grads: Gradients) -> None:
        """Send the gradients of a stage's input to where its parts came from."""
        sources: dict[Any, int] = {VALUE: j - 1, **self._layout.popped[j]}
        for key, found in grads.items():
            source = sources[key]
            if source < 0:
                self._links.leave(found, j)
            waiting = self.grads.setdefault((source, i), {})
            waiting[key] = self._links.send(found, j, source, i)

    def receive_grads(self, j: int, i: int) -> dict[Any, Sequence[Tensor | None]]:
        """The gradients of a stage's output; of the caller's tensors for what is before the first.

        That of the last stage comes from its loss, not from here.
        """
        found = self.grads.pop((j, i), {})
        for tensors, event in found.values():
            self._links.receive(tensors, event, j)
        return {key: sent.tensors for key, sent in found.items()}
