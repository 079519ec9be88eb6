"""The ways of tensors between workers: links that copy, and the post that keeps what arrives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchgpipe.ambient import labels
from torchgpipe.autograd.copy import copy, hand_over, leave
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.recorder import copy_mark
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    has_streams,
    record,
    record_all,
    record_stream,
    use_stream,
    wait_for,
    wait_stream,
)
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import Step
from torchgpipe.engine.step_plan import StepPlan
from torchgpipe.schedule.program import Instruction, Overlap
from torchgpipe.skip.tracker import Parcels
from torchgpipe.values.division import FlatInput
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []


# Links: how tensors get from one worker to another, on lanes, while both go on computing.
#
# ::
#
#   worker 0   compute  ── F ──┬─────────────────────────────────────── ...
#                              ↓ event
#              lane            └─ copy ─┐
#                                       ↓
#   worker 1   lane                     └─ arrives ─┐
#                                                   ↓ event
#              compute  ─────── other work ─────────┴─ waits ── F ───── ...
#
# A link leads from a stage to another one on another worker, and back for gradients. Each
# direction has lanes of its own on both devices, used round-robin. So a copy waits only for the
# computation that made the tensors, and only the computation that needs them waits for the copy.


class Sent(NamedTuple):
    """Tensors on their way."""

    tensors: tuple[Tensor | None, ...]
    event: Any = None


class Links:
    """The streams of one step."""

    def __init__(
        self, plan: StepPlan, stages: Stages, arriving: Sequence[tuple[Tensor, Any]]
    ) -> None:
        pool, recording = stages.pool, stages.recording
        #: Takes the times of computations and copies while the model is traced; None otherwise.
        self.recorder = None if recording is None else recording.recorder
        self._arriving = arriving
        self._placement = plan.schedule.placement
        #: The caller's stream for the device of each worker.
        self.outside = [current_stream(device) for device in plan.devices]
        owners = {(stages.groups[j], plan.devices[w], w) for j, w in enumerate(self._placement)}
        sharing = Counter([(group, device) for group, device, _ in owners])
        # Layers may have state, which two workers must not change at the same time. So if two
        # workers of a device share layers, all workers of that device share one stream.
        # guard: workers that share layers
        single = {device for (_, device), count in sharing.items() if count > 1}
        counts = {x: 1 if x in single else count for x, count in plan.counts.items()}
        made = {x: cycle(pool.computing(x, count)) for x, count in counts.items()}
        #: The stream on which each worker computes.
        self.compute = [next(made[device]) for device in plan.devices]
        # How many streams of its pool each device computes on: none, if on the caller's stream.
        in_use = Counter({x: count for x, count in counts.items() if count > 1})
        self.stage_streams = [self.compute[w] for w in self._placement]
        #: For each worker with overlaps, the stream on which its layers' collectives communicate.
        self.communicating: dict[int, AbstractStream] = {}
        if plan.overlaps:
            self._overlap(plan, pool, stages.groups, in_use)
        #: For each stage, whether results must be recorded for the caller, who has another stream.
        self.has_own_stream = [
            stream != self.outside[w] for stream, w in zip(self.stage_streams, self._placement)
        ]
        self._lanes = self._ways(plan, pool, in_use) if len(self.compute) > 1 else {}
        self._used: Counter[tuple[int, int]] = Counter()

    def _overlap(
        self, plan: StepPlan, pool: StreamPool, groups: Sequence[int], in_use: Counter[torch.device]
    ) -> None:
        """Give workers with overlaps a second stream to compute on, and one to communicate on."""

        def next_stream(device: torch.device) -> AbstractStream:
            streams = pool.some(device, pool.POOL - 1)
            in_use[device] += 1
            return streams[(in_use[device] - 1) % len(streams)]

        overlapping = {
            w: others
            for w, line in enumerate(plan.schedule.program)
            if (others := _on_the_other_stream(line, groups)) is not None
        }
        for w, others in overlapping.items():
            if has_streams(plan.devices[w]):
                second = next_stream(plan.devices[w])
                for j, worker in enumerate(self._placement):
                    if worker == w and groups[j] in others:
                        self.stage_streams[j] = second
        for w in overlapping:
            self.communicating[w] = next_stream(plan.devices[w])

    def _ways(
        self, plan: StepPlan, pool: StreamPool, in_use: Counter[torch.device]
    ) -> dict[tuple[int, int], tuple[list[AbstractStream], list[AbstractStream]]]:
        """The lanes at both ends of each way: from stage to stage on two streams, and back.

        On a device without streams, all lanes are its one stream, which does its work at once.
        """
        workers = self._placement
        pairs = dict.fromkeys([*pairwise(range(len(workers))), *plan.schedule.skips])
        there = [(j, k) for j, k in pairs if self.compute[workers[j]] != self.compute[workers[k]]]
        ways = [*there, *((k, j) for j, k in there)]
        ends = Counter(plan.devices[workers[stage]] for way in ways for stage in way)
        lanes = {x: iter(pool.lanes(x, in_use[x], count, least=1)) for x, count in ends.items()}
        devices = [plan.devices[w] for w in workers]
        return {(j, k): (next(lanes[devices[j]]), next(lanes[devices[k]])) for j, k in ways}

    def send(self, tensors: Sequence[Tensor | None], source: int, target: int, i: int) -> Sent:
        """Send tensors of a micro-batch from one stage to another.

        The compute stream of the source is current.
        """
        present = [x for x in tensors if x is not None]
        way = source, target
        if way not in self._lanes or not present:
            return Sent(tuple(tensors))
        number = self._used[way]
        self._used[way] += 1
        sources, targets = self._lanes[way]
        lane, arriving = sources[number % len(sources)], targets[number % len(targets)]
        leaving = leave(self.compute[self._placement[source]], lane, *present)
        mark = None
        with use_stream(arriving):
            if self.recorder is not None and lane.device != arriving.device:
                mark = self.recorder.begin(copy_mark(arriving, source, target, i), lane)
            with labels.within(labels.of("copy", source, i, target)):
                copies = iter(copy(lane, arriving, *leaving))
            if self.recorder is not None and mark is not None:
                self.recorder.end(mark)
        return Sent(tuple([x if x is None else next(copies) for x in tensors]), record(arriving))

    def receive(self, tensors: Iterable[Tensor | None], event: Any, target: int) -> None:
        """Have the compute stream of a stage, which is current, wait for tensors."""
        if event is not None:
            stream = self.compute[self._placement[target]]
            # guard: waiting for what is sent
            wait_for(stream, event)
            # guard: recording what is received
            record_all(tensors, stream)

    def record_on(self, tensors: Iterable[Tensor | None], stream: AbstractStream) -> None:
        """Announce that tensors from one of a worker's two streams are used on the other one."""
        # guard: recording for the other stream
        record_all(tensors, stream)

    def record_for_caller(self, tensors: Iterable[Tensor | None], j: int) -> None:
        """Announce that tensors of a stage are used by the caller."""
        if self.has_own_stream[j]:
            # guard: recording what goes to the caller
            record_all(tensors, self.outside[self._placement[j]])

    def begin(self) -> None:
        """Make compute streams wait for the caller's, who may have changed weights."""
        last = self._placement[-1]
        for tensor, event in self._arriving:
            # guard: waiting for targets
            wait_for(self.compute[last], event)
            # guard: recording targets
            record_stream(tensor, self.stage_streams[-1])
        for stream, caller in zip(self.compute, self.outside):
            if stream != caller:
                # guard: workers after the caller
                wait_stream(stream, caller)

    def end(self) -> None:
        """Make the caller's streams wait for the compute streams."""
        for stream, caller in zip(self.compute, self.outside):
            if stream != caller:
                # guard: the caller after workers
                wait_stream(caller, stream)


def _on_the_other_stream(line: Sequence[Instruction], groups: Sequence[int]) -> set[int] | None:
    """The groups of a worker whose computations are on its second stream; None without overlaps.

    A group stays on one stream: autograd adds the gradients of a weight on the stream on which the
    weight was used first.
    """
    other: dict[int, bool] = {}
    for x in line:
        if isinstance(x, Overlap):
            first, second = groups[x.first.stage], groups[x.second.stage]
            if second in other:
                other.setdefault(first, not other[second])
            other.setdefault(first, False)
            other.setdefault(second, not other[first])
    return {group for group, is_other in other.items() if is_other} if other else None


def fetch(pool: StreamPool, targets: FlatInput, device: torch.device) -> list[tuple[Tensor, Any]]:
    """Copy the tensors of targets to a device, on lanes, and put the copies in their places.

    Returns:
        The copies, each with an event that whoever uses it has to wait for.
    """
    arriving: list[tuple[Tensor, Any]] = []

    def fetched(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device == device:
            return x
        # Copied on the last stream of each pool: links use the first streams, and must not wait.
        here, there = (pool.some(where, pool.POOL - 1)[-1] for where in (x.device, device))
        hand_over([x], current_stream(x.device), here)
        with use_stream(there):
            (arrived,) = copy(here, there, x)
        event = record(there)
        if event is not None:
            arriving.append((arrived, event))
        return arrived

    targets.map(fetched)
    return arriving


# The post: an inbox for each stage, which keeps what was sent there until the stage receives it.
#
# ::
#
#   F of (j, i)   value  ──→ stage j + 1                 B of (j, i)   gradient of each part
#                 skips  ──→ the stages that pop them                  ──→ where the part came from
#
# Before the first stage is the caller: the micro-batches come from there, and the gradients of
# their tensors go back to it. A stage may be in another process. What waits in its inbox is sent
# there by :mod:`torchgpipe.distributed.mail`, which also puts what that stage sends into inboxes.


#: For each part of a micro-batch (the value, or a skip), the gradients of its tensors. A tensor
#: that occurs twice in a part has one gradient there; None stands for no gradient.
Gradients: TypeAlias = dict[Any, Sequence[Tensor | None]]


class Post:
    """The values, skips and gradients on their way between the stages of one step.

    Args:
        step: the step.
        links: the links that tensors travel on.
        batches: the micro-batches, which this list lets go of; an empty list if the first stage is
            in another process.
    """

    def __init__(self, step: Step, links: Links, batches: list[Batch]) -> None:
        self._links, self._layout = links, step.stages.skip_layout
        # A post that held the step would keep both in memory, since steps hold their post.
        self.numbers = step.numbers
        #: For each ``(stage, micro-batch)``, the value that the stage has not received yet, and the
        #: event after the copy of it; None if nothing is to be waited for.
        self.values: dict[tuple[int, int], tuple[Batch, Any]] = {
            (0, i): (batch, None) for i, batch in enumerate(batches)
        }
        batches.clear()
        #: For each micro-batch, the skips that were stashed and not popped yet.
        self.parcels: defaultdict[int, Parcels] = defaultdict(Parcels)
        #: For each ``(micro-batch, part)``, the event after the copy of that value or skip, until
        #: receive() waits for it; send() moves the event of a value to ``values``.
        self._events: dict[tuple[int, Any], Any] = {}
        #: For each ``(stage, micro-batch)``, the gradients of its output that the stage has not
        #: received yet, by part (the value, or a skip); stage -1 is the caller.
        self.grads: dict[tuple[int, int], dict[Any, Sent]] = {}

    def send(self, j: int, i: int, output: Batch) -> None:
        """Send an output to the next stage, and its skips to those that pop them."""
        targets: dict[Any, int] = {VALUE: j + 1, **self._layout.stashed[j]}
        for key in [*output.parts]:
            output = output.map(partial(self._sent, key, j, targets[key], i), [key])
        value = self.parcels[i].packed(output)
        self.values[j + 1, i] = value, self._events.pop((i, VALUE), None)

    def _sent(self, key: Any, j: int, target: int, i: int, *tensors: Tensor) -> list[Tensor]:
        sent = self._links.send([x.detach() for x in tensors], j, target, i)
        self._events[i, key] = sent.event
        return [
            # If y requires a gradient, the next cell computes it, and send_grads() sends it back.
            # The cell asks autograd for the gradient of an edge, so y.grad stays None.
            y.requires_grad_(x.requires_grad)
            for x, y in zip(tensors, sent.tensors)
            if y is not None
        ]

    def receive(self, j: int, i: int) -> Batch:
        """The micro-batch that waits for a stage, beside the skips that the stage pops."""
        batch, event = self.values.pop((j, i))
        if event is not None:
            self._links.receive(batch, event, j)
        if popped := self._layout.popped[j]:
            batch = self.parcels[i].unpacked(batch, popped)
        for skip in popped:
            self._links.receive(batch.parts[skip], self._events.pop((i, skip), None), j)
        return batch

    def send_grads(self, j: int, i: int, grads: Gradients) -> None:
        """Send the gradients of a stage's input to where its parts came from."""
        sources: dict[Any, int] = {VALUE: j - 1, **self._layout.popped[j]}
        for key, tensors in grads.items():
            source = sources[key]
            if source < 0:
                self._links.record_for_caller(tensors, j)
            waiting = self.grads.setdefault((source, i), {})
            waiting[key] = self._links.send(tensors, j, source, i)

    def receive_grads(self, j: int, i: int) -> dict[Any, Sequence[Tensor | None]]:
        """The gradients of a stage's output; of the caller's tensors for what is before the first.

        That of the last stage comes from its loss, not from here.
        """
        inbox = self.grads.pop((j, i), {})
        for tensors, event in inbox.values():
            self._links.receive(tensors, event, j)
        return {key: sent.tensors for key, sent in inbox.items()}
