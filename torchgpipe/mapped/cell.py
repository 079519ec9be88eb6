"""A cell: a micro-batch on one device, until a module on another device is called.

::

    stage j                     stage j+1

    layers
      │
    leave                                      a clone of what goes to another device
      │
    fork, or Recompute ────→ Copy              on lanes, which wait for nothing but this
                              │
                             wait
                              │
                            layers

The functions, and the streams that each of them belongs to, are those of
:mod:`torchgpipe.engine.cell`. What differs is that nobody knows beforehand which tensors will go
where. A tensor leaves when a module elsewhere is called with it. It comes to a device once, however
many modules there are called with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.autograd.copy import copy, leave, wait
from torchgpipe.autograd.fork_join import fork, join, needs_backward
from torchgpipe.autograd.recompute import Recompute
from torchgpipe.devices.streams import has_streams, record_stream, use_stream
from torchgpipe.mapped.step import MappedStep, Stage
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.values.structure import ATOMS, flatten

__all__: list[str] = []


class Cell:
    """Micro-batch ``i`` in one stage.

    Args:
        step: the step.
        i: the number of the micro-batch.
        stage: the stage.
        at: the latest cell of this micro-batch on a device.
    """

    def __init__(
        self, step: MappedStep, i: int, stage: Stage, at: Callable[[torch.device], Cell]
    ) -> None:
        self.step, self.i, self.stage = step, i, stage
        self._at = at
        #: Whether a mapped module was called here.
        self.entered = False
        #: The lane on which tensors come and go.
        self.lane = stage.lanes[i % len(stage.lanes)]
        #: The checkpoints of the modules that were called here.
        self.checkpoints: list[Checkpoint] = []
        #: What has come, by the identity of the original, which is held so that no other tensor
        #: has that identity; and what has left.
        self._come: dict[int, tuple[Tensor, Tensor]] = {}
        self._left: dict[int, tuple[Tensor, Tensor]] = {}
        #: Whether a gradient goes back from here, whose arrival the fence holds back.
        self._held = False

    def fetch_all(self, value: Any) -> Any:
        """Bring the tensors of a value here.

        Raises:
            TypeError: the value holds tensors in something that is no known container.
        """
        tensors = [*tensors_of(value)]
        device = self.stage.device
        if self.stage.visit:
            for tensor in tensors:
                # It may be of an earlier visit.
                if tensor.device == device:
                    record_stream(tensor, self.stage.compute)
        elsewhere = [tensor for tensor in tensors if tensor.device != device]
        if not elsewhere:
            return value
        self._fetch(elsewhere)
        return replaced(value, lambda x: x if x.device == device else self._come[id(x)][1])

    def fetch(self, tensor: Tensor) -> Tensor:
        """Bring a tensor here, once."""
        fetched: Tensor = self.fetch_all(tensor)
        return fetched

    def _fetch(self, tensors: Sequence[Tensor]) -> None:
        """Bring tensors here that are elsewhere, those of one device together."""
        missing: dict[torch.device, dict[int, Tensor]] = {}
        for tensor in tensors:
            if id(tensor) not in self._come:
                missing.setdefault(tensor.device, {})[id(tensor)] = tensor
        for device, found in missing.items():
            originals = tuple(found.values())
            if has_streams(device) and has_streams(self.stage.device):
                arrived = self._fetch_from(self._at(device), originals)
            else:
                # The host waits anyway.
                arrived = tuple([x.to(self.stage.device) for x in originals])
            self._come.update(zip(found, zip(originals, arrived)))

    def _fetch_from(self, source: Cell, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaving = source._send(tensors)
        self.step.goes(source.stage, self.stage)
        needed = any(x.requires_grad for x in leaving)
        phonies = self._phonies() if needed else []
        with use_stream(self.lane):
            arriving = copy(source.lane, self.lane, *leaving, phonies=phonies)
        with use_stream(self.stage.compute):
            arriving = wait(self.lane, self.stage.compute, *arriving)
        self._held |= needed
        return arriving

    def stay(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Fence what the model returns from here."""
        with use_stream(self.stage.compute):
            return self._fenced(tensors)

    def _send(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Put tensors on the lane, from which other devices copy them."""
        waiting = tuple([x for x in tensors if id(x) not in self._left])
        if waiting:
            compute = self.stage.compute
            with use_stream(compute):
                leaving = leave(compute, self.lane, *waiting)
            with use_stream(self.lane):
                leaving = self._fenced(leaving, self.checkpoints)
            self._left.update((id(x), (x, y)) for x, y in zip(waiting, leaving))
        return [self._left[id(x)][1] for x in tensors]

    def _fenced(
        self, tensors: tuple[Tensor, ...], checkpoints: Sequence[Checkpoint] = ()
    ) -> tuple[Tensor, ...]:
        """Fence tensors, whose gradients trigger the recomputation of checkpoints."""
        if not (self.step.fenced and needs_backward(tensors)):
            return tensors
        if not self._held:
            tensors = join(tensors, *self._phonies())
        if checkpoints:
            *outputs, phony = Recompute.apply(partial(_recompute, [*checkpoints]), *tensors)
            tensors = tuple(outputs)
        else:
            tensors, phony = fork(tensors)
        self.step.phonies.setdefault((self.i, self.stage), []).append(phony)
        return tensors

    def _phonies(self) -> list[Tensor]:
        """The phonies of the cells that backward shall come to after this one."""
        found = self.step.phonies
        cells = [(self.i - 1, self.stage)]
        cells += [(self.i - self.stage.lead, x) for x in self.step.targets.get(self.stage, ())]
        return [phony for cell in dict.fromkeys(cells) for phony in found.get(cell, ())]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value.

    Raises:
        TypeError: the value holds tensors in something that is no known container.
    """
    # Most arguments are tensors, and tuples and dicts of them. PyTorch's functions for trees take
    # several times as long.
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for x in value:
            yield from tensors_of(x)
    elif type(value) is dict:
        for x in value.values():
            yield from tensors_of(x)
    elif type(value) not in ATOMS:
        yield from flatten(value)[0]


def replaced(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A value with a function of each of its tensors in place of the tensor."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is tuple or kind is list:
        return kind([replaced(x, function) for x in value])
    if kind is dict:
        return {key: replaced(x, function) for key, x in value.items()}
    tensors, structure = flatten(value)
    return structure.unflatten(tuple(map(function, tensors))) if tensors else value


def _recompute(checkpoints: Sequence[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        checkpoint.recompute()
