"""Lanes: the streams on which micro-batches come to the partitions, and leave them.

::

    caller ─→ lane ─→ partition ─→ lane ─→ lane ─→ partition ─→ lane ─→ caller
              └───── device 0 ──────┘      └───── device 1 ──────┘

A lane is a copy stream of a partition; values and skips have lanes of their own. A partition that
is alone on its device computes on the caller's stream there, so its work is in order with what the
caller gave to that device. Partitions that share a device compute on streams of their own, so that
they overlap, unless they share layers. For these partitions the caller's stream is another one:
their inputs are handed over from it, and their outputs back to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient import labels
from torchgpipe.autograd.copy import copy
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.autograd.nodes import between
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    get_device,
    record_stream,
    use_stream,
    wait_all,
    wait_stream,
)
from torchgpipe.engine.recorded import Recording
from torchgpipe.engine.stages import Stages
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

OnTensors: TypeAlias = Callable[..., tuple[Tensor, ...]]


class Lanes:
    """The streams of one step."""

    def __init__(self, stages: Stages) -> None:
        self._partitions = stages.partitions
        devices, skip_layout = stages.devices, stages.skip_layout
        n = len(devices)
        # Partitions that share layers must not compute at the same time, so they share streams.
        users = list(zip(devices, stages.groups))
        counts = Counter([device for device, _ in set(users)])
        has_skips = any(skip_layout.popped)
        made = {
            device: iter(stages.pool.get(device, count, skips=has_skips))
            for device, count in counts.items()
        }
        of_user = {user: next(made[user[0]]) for user in dict.fromkeys(users)}
        self._streams = [of_user[user] for user in users]
        #: The caller's stream for the device of each partition.
        self._outside = [current_stream(device) for device in devices]
        #: The stream on which each partition computes.
        self.compute = [streams.compute for streams in self._streams]
        #: For each partition: each part of its input (the value, or a skip) that comes from another
        #: stream, with the index of the partition that sends it, -1 for the caller. Backward copies
        #: gradients of these parts in the reverse order: skips from near partitions, whose backward
        #: is due first, then skips from far partitions, then the value.
        self.sources = [
            # guard: skips first
            # guard: near skips first
            self._elsewhere(j, {VALUE: j - 1, **by_partition(skip_layout.popped[j])})
            for j in range(n)
        ]
        #: For each partition: each part of its output (the value, or a skip) that goes to another
        #: stream, with the index of the partition that gets it; n, their number, is the caller.
        self.targets = [
            self._elsewhere(j, {VALUE: j + 1, **skip_layout.stashed[j]}) for j in range(n)
        ]
        #: For each stream of the caller, the streams that wait_for_caller() makes wait for it.
        self._others: dict[AbstractStream, set[AbstractStream]] = {}
        for j, (compute, values, skips) in enumerate(self._streams):
            if self.sources[j] or self.targets[j]:
                # guard: copies after the caller
                used = {compute, *values, *skips} - {self._outside[j]}
                self._others.setdefault(self._outside[j], set()).update(used)
        # The least number of lanes of a partition: micro-batches i and i + pool may use one lane.
        pool = min(len(streams.values) for streams in self._streams)
        #: How many micro-batches a partition may be ahead of a neighbour before it reuses a lane.
        self.lead = pool - 1
        #: For :class:`~torchgpipe.engine.step.Fence`: for each partition ``j``, and each ``k`` that
        #: it sends to, by how many micro-batches ``k`` may be ahead of ``j`` in backward.
        self.ahead = {
            # guard: a short lead
            j: {k: range(k - j + 1, self.lead + 1) for k in self.targets[j].values() if k < n}
            for j in range(n)
        }
        #: For each partition ``j``, the pairs ``(di, k)`` for which the cell ``(i + di, k)``, on
        #: another device, must be computed before the cell ``(i, j)``.
        self._needs = [
            [(di, k) for di, k in self._offsets(j, pool) if devices[k] != devices[j]]
            for j in range(n)
        ]

    def _elsewhere(self, j: int, parts: dict[Any, int]) -> dict[Any, int]:
        # streams[k + 1] is the stream of partition k, or of the caller if k is -1 or n.
        streams = [self._outside[0], *self.compute, self._outside[-1]]
        return {part: k for part, k in parts.items() if streams[k + 1] != self.compute[j]}

    def _offsets(self, j: int, pool: int) -> Iterator[tuple[int, int]]:
        """The cells that a cell of a partition needs, as ``(di, k)``: inputs, and free lanes.

        A skip may go so far that its lanes are used again before it arrives, by micro-batches that
        are computed at the same time. Then all cells whose skips take these lanes keep the order of
        the clock cycles.
        """
        if j:
            yield 0, j - 1
        for k in self.targets[j].values():
            if k < len(self.compute):
                # guard: lead in forward
                yield -max(self.lead, k - j + 1), k
        for part, source in self.sources[j].items():
            if part is not VALUE:
                for k in (source, *self.targets[source].values()):
                    if max(j, k) - source >= pool:
                        yield j - k - (k > j), k

    def needs(self, i: int, j: int, m: int) -> list[tuple[int, int]]:
        """The cells on other devices that must be computed before a cell."""
        return [(min(i + di, m - 1), k) for di, k in self._needs[j] if i + di >= 0]

    def lane(self, i: int, k: int, part: Hashable) -> AbstractStream:
        """The stream on which a part of micro-batch ``i`` comes to a partition, or leaves it."""
        if k < 0:
            return self._outside[0]
        streams = self._streams[k]
        # guard: a lane for skips
        copies = streams.values if part is VALUE else streams.skips
        # guard: lanes in turns
        # guard: lanes beside computing
        return copies[i % len(copies)]

    def wait_for_caller(self) -> None:
        """Make all other streams wait for the caller's.

        Between steps the caller changes the gradients of parameters, or uses and frees them. The
        memory of a gradient belongs to a compute stream, or to the lane on which it arrived.
        """
        for caller, streams in self._others.items():
            wait_all(streams, caller)

    def have_caller_wait(self) -> None:
        """Make the caller's current streams wait for the compute streams."""
        for stream in {*self.compute} - {*self._outside}:
            wait_stream(current_stream(get_device(stream)), stream)

    @uncompiled
    def end_backward(self) -> None:
        """Hand gradients over to the caller; their memory belongs to a partition's streams."""
        self.have_caller_wait()
        for layers, stream, caller in zip(self._partitions, self.compute, self._outside):
            if stream != caller:
                for parameter in layers.parameters():
                    # guard: recording gradients
                    if parameter.grad is not None:
                        record_stream(parameter.grad, current_stream(get_device(stream)))

    def back_to_caller(self, batches: Sequence[Batch]) -> list[Batch]:
        """Hand the outputs of the last partition over to the caller."""
        # guard: back to the caller
        if VALUE in self.targets[-1]:
            n, caller = len(self.compute), self._outside[-1]
            with use_stream(caller):
                batches = [
                    batch.map(partial(copy, self.lane(i, n - 1, VALUE), caller), [VALUE])
                    for i, batch in enumerate(batches)
                ]
        outputs = tuple([tensor for batch in batches for tensor in batch])
        if {*self.compute} != {*self._outside} and needs_backward(outputs):
            # When backward begins, partitions wait for the caller, which may have used gradients of
            # another backward since the forward. When backward ends, the caller waits for all
            # partitions, since it may change weights next. Autograd itself makes the caller wait
            # only for streams on which a leaf has got a gradient.
            passed = iter(between(self.wait_for_caller, self.end_backward, *outputs))
            batches = [batch.replace([next(passed) for _ in batch]) for batch in batches]
        return list(batches)


def carried(
    lanes: tuple[AbstractStream, AbstractStream],
    stages: tuple[int, int],
    i: int,
    recording: Recording | None,
    phonies: Sequence[Tensor],
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Copy tensors of micro-batch ``i`` from a lane of one stage, or the caller, to another's.

    The copy belongs to the current stream. In backward, the nodes that use these tensors run before
    the nodes of the phonies.
    """
    source, target = stages
    function: OnTensors = partial(copy, *lanes, phonies=phonies)
    if recording is not None:
        function = recording.copying(function, lanes, stages, i)
    with labels.within(labels.of("copy", source, i, target) if source >= 0 else None):
        return function(*tensors)


def by_partition(parts: dict[Any, int]) -> dict[Any, int]:
    """Sort parts by the partition at their other end."""
    return dict(sorted(parts.items(), key=lambda item: item[1]))
