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

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchgpipe.autograd.copy import copy, leave, wait
from torchgpipe.autograd.fork_join import fork, join, needs_backward
from torchgpipe.autograd.recompute import Recompute
from torchgpipe.devices.streams import has_streams, record_stream, use_stream
from torchgpipe.mapped.step import MappedStep, Stage
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.values.microbatch import VALUE, Batch

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

    def fetch_all(self, batch: Batch) -> Batch:
        """Bring the tensors of a call here."""
        device = self.stage.device
        if any(x.device != device for x in batch):
            batch = batch.map(lambda *xs: [self.fetch(x) for x in xs], [VALUE])
        if self.stage.visit:
            for x in batch:
                # It may be of an earlier visit.
                record_stream(x, self.stage.compute)
        return batch

    def fetch(self, tensor: Tensor) -> Tensor:
        """Bring a tensor here, once."""
        device = self.stage.device
        if tensor.device == device:
            return tensor
        if not (has_streams(device) and has_streams(tensor.device)):
            # The host waits anyway.
            return tensor.to(device)
        found = self._come.get(id(tensor))
        if found is None:
            source = self._at(tensor.device)
            leaving = source._send(tensor)
            self.step.goes(source.stage, self.stage)
            phonies = self._phonies() if leaving.requires_grad else []
            with use_stream(self.lane):
                (arriving,) = copy(source.lane, self.lane, leaving, phonies=phonies)
            with use_stream(self.stage.compute):
                (arriving,) = wait(self.lane, self.stage.compute, arriving)
            self._held |= arriving.requires_grad
            found = self._come[id(tensor)] = tensor, arriving
        return found[1]

    def stay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Fence what the model returns from here."""
        with use_stream(self.stage.compute):
            return [self._fenced(x) for x in tensors]

    def _send(self, tensor: Tensor) -> Tensor:
        """Put a tensor on the lane, from which other devices copy it."""
        found = self._left.get(id(tensor))
        if found is None:
            compute = self.stage.compute
            with use_stream(compute):
                (leaving,) = leave(compute, self.lane, tensor)
            with use_stream(self.lane):
                leaving = self._fenced(leaving, self.checkpoints)
            found = self._left[id(tensor)] = tensor, leaving
        return found[1]

    def _fenced(self, tensor: Tensor, checkpoints: Sequence[Checkpoint] = ()) -> Tensor:
        """Fence a tensor, whose gradient triggers the recomputation of checkpoints."""
        if not (self.step.fenced and needs_backward((tensor,))):
            return tensor
        if not self._held:
            tensor = join(tensor, *self._phonies())
        if checkpoints:
            tensor, phony = Recompute.apply(partial(_recompute, [*checkpoints]), tensor)
        else:
            tensor, phony = fork(tensor)
        self.step.phonies.setdefault((self.i, self.stage), []).append(phony)
        return tensor

    def _phonies(self) -> list[Tensor]:
        """The phonies of the cells that backward shall come to after this one."""
        found = self.step.phonies
        cells = [(self.i - 1, self.stage)]
        cells += [(self.i - self.stage.lead, x) for x in self.step.targets.get(self.stage, ())]
        return [phony for cell in dict.fromkeys(cells) for phony in found.get(cell, ())]


def _recompute(checkpoints: Sequence[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        checkpoint.recompute()
