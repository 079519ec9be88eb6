"""The layers of a traced model: what each takes of its partition, and how much it hands on.

Hooks around the forward of each layer take the times of two micro-batches in each step, and are
gone then until the next one: more times would tell little, and each hook takes a while on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.advice.figures import Layer
from torchgpipe.advice.strays import Stray, Strays
from torchgpipe.devices.recorder import Recorder, WorkTimes
from torchgpipe.devices.streams import current_stream
from torchgpipe.recompute.phase import is_recomputing
from torchgpipe.values.trees import leaves_of

__all__: list[str] = []

#: The micro-batches of a step that are timed.
TIMED = 2


class Layers:
    """The layers of a model, with hooks until :meth:`stop`.

    Args:
        layers: the layers, each with its device.
        recorder: takes the times.
    """

    def __init__(
        self, layers: Sequence[tuple[nn.Module, torch.device]], recorder: Recorder
    ) -> None:
        self._recorder = recorder
        self._found = layers
        self._times: dict[int, list[WorkTimes]] = {}
        self._bytes: dict[int, int] = {}
        #: The rows of a micro-batch; 0 if no tensor has any.
        self.rows = 0
        self._strays = Strays([device for _, device in layers], recorder)
        #: The hooks of each layer.
        self._handles: dict[int, list[Any]] = {}
        # A hook cannot tell which of its places a layer is called at.
        if len({id(x) for x, _ in self._found}) == len(self._found):
            recorder.at_steps.append(self._start)

    def _start(self) -> None:
        """Have hooks anew. The last step counts."""
        self.stop()
        self._times.clear()
        self._bytes.clear()
        self._strays.clear()
        for k, (layer, device) in enumerate(self._found):
            before = partial(self._begin, k, device)
            self._handles[k] = [
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(partial(self._end, k)),
            ]

    def stop(self) -> None:
        """Take the hooks away."""
        for k in [*self._handles]:
            self._remove(k)

    def _remove(self, k: int) -> None:
        for handle in self._handles.pop(k, ()):
            handle.remove()

    @property
    def called(self) -> list[int]:
        """The numbers of the layers, in the order of their first calls."""
        return [*self._times]

    def found(self, order: Sequence[int] | None = None) -> list[Layer]:
        """The layers, once the devices are done; none if not all of them were timed.

        Args:
            order: their numbers in the order to list them in; by default their own.
        """
        order = range(len(self._found)) if order is None else order
        if not self._bytes.keys() >= {*order}:
            return []
        strays: dict[int, list[Stray]] = {}
        for stray in self._strays.found():
            strays.setdefault(stray.layer, []).append(stray)
        return [self._layer(k, strays.get(k, [])) for k in order]

    def _layer(self, k: int, strays: Sequence[Stray]) -> Layer:
        bounds = [*map(self._recorder.bounds, self._times[k])]
        times = [stop - start for start, stop in bounds]
        if strays:
            # What is behind the copy, in the micro-batch in which it was looked for, the first one.
            start, stop = bounds[0]
            times.append(max(0.0, stop - max(start, *(x.end for x in strays))))
        others = tuple([str(x.device) for x in strays])
        return Layer(min(times), self._bytes[k], str(self._found[k][1]), others)

    def _begin(self, k: int, device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> None:
        if is_recomputing():
            return
        if k == 0:
            tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            self.rows = max([len(x) for x in tensors if x.dim()], default=0)
        times = self._times.setdefault(k, [])
        if not times:
            self._strays.before(k, device)
        times.append(self._recorder.before(current_stream(device)))

    def _end(self, k: int, _: nn.Module, input: Any, output: Any) -> None:
        if is_recomputing():
            return
        times = self._times[k]
        times[-1].end()
        if len(times) == 1:
            self._strays.after(k)
        if len(times) == TIMED:
            self._remove(k)
        self._bytes[k] = sum(x.nbytes for x in leaves_of(output) if isinstance(x, Tensor))
