"""The layers of a traced model: what each takes of its partition, and how much it hands on.

Hooks around the forward of each layer take the times of two micro-batches in each step. More would
tell little, and each takes a while on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe._torch import tree_leaves
from torchgpipe.advice.figures import Layer
from torchgpipe.devices.recorder import Recorder, Times
from torchgpipe.devices.streams import current_stream
from torchgpipe.recompute.phase import is_recomputing

__all__: list[str] = []

#: The micro-batches of a step that are timed.
TIMED = 2


class Layers:
    """The layers of some partitions, with hooks until :meth:`stop`.

    Args:
        partitions: the partitions.
        devices: the device of each.
        recorder: takes the times.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        found = [(layer, x) for part, x in zip(partitions, devices) for layer in part]
        self._step = -1
        self._calls: Counter[int] = Counter()
        self._times: dict[int, list[Times]] = {}
        self._bytes: dict[int, int] = {}
        #: The rows of a micro-batch; 0 if no tensor has any.
        self.rows = 0
        self._count = len(found)
        self._handles: list[Any] = []
        if len({id(x) for x, _ in found}) < len(found):
            # A hook cannot tell which of its places a layer is called at.
            return
        for k, (layer, device) in enumerate(found):
            before = partial(self._begin, k, device)
            self._handles += [
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(partial(self._end, k, device)),
            ]

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def found(self) -> list[Layer]:
        """The layers, once the devices are done; none if not all of them were timed."""
        if len(self._bytes) < self._count:
            return []
        return [
            Layer(min(map(self._recorder.between, self._times[k])), self._bytes[k])
            for k in range(self._count)
        ]

    def _begin(self, k: int, device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> None:
        if is_recomputing():
            return
        if self._recorder.step != self._step:
            # The last step counts.
            self._step = self._recorder.step
            self._calls.clear()
            self._times.clear()
            self._bytes.clear()
        self._calls[k] += 1
        if self._calls[k] <= TIMED:
            if k == 0:
                tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                self.rows = max([len(x) for x in tensors if x.dim()], default=0)
            stream = current_stream(device)
            self._times.setdefault(k, []).append(self._recorder.before(stream))

    def _end(self, k: int, device: torch.device, _: nn.Module, input: Any, output: Any) -> None:
        if is_recomputing() or self._calls[k] > TIMED:
            return
        times = self._times[k][-1]
        times.end()
        self._bytes[k] = sum(x.nbytes for x in tree_leaves(output) if isinstance(x, Tensor))
