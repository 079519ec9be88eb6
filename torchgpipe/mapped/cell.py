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

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient import labels
from torchgpipe.autograd.copy import copy, leave, wait
from torchgpipe.autograd.fork_join import fork, join, needs_backward
from torchgpipe.autograd.recompute import Recompute
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import has_streams, record_stream, use_stream
from torchgpipe.mapped.containers import replaced, tensors_of
from torchgpipe.mapped.step import MappedStep, Stage
from torchgpipe.recompute.checkpoint import Checkpoint

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
        #: The stream of the visit of the device before this one.
        self.before = stage.compute
        #: Whether a mapped module was called here.
        self.entered = False
        #: The lane on which tensors come and go.
        self.lane = stage.lanes[i % len(stage.lanes)]
        #: The checkpoints of the modules that were called here.
        self.checkpoints: list[Checkpoint] = []
        #: What was computed in this visit, if it is not the first one.
        self._made: dict[int, weakref.ref[Tensor]] = {}
        #: What has come, and what has left.
        self._come, self._left = Copies(), Copies()
        #: Whether a gradient goes back from here, whose arrival the fence holds back.
        self._held = False

    @property
    def label(self) -> labels.Label | None:
        """The label of what is computed here, if somebody observes it."""
        return labels.of("F", self.stage.number, self.i)

    def fetch_all(self, value: Any, copies: list[Any]) -> Any:
        """Bring the tensors of a value here.

        Args:
            value: the value.
            copies: a list to which all lists and dicts are added that had to be copied.
        """
        device = self.stage.device
        if not self.stage.visit:
            # Most often nothing comes that is not here already.
            missing = False

            def known(tensor: Tensor) -> Tensor:
                nonlocal missing
                found = tensor if tensor.device == device else self._come.get(tensor)
                missing |= found is None
                return tensor if found is None else found

            found = replaced(value, known, copies)
            if not missing:
                return found
            copies.clear()
        tensors = tensors_of(value)
        fetched = self.come([x for x in tensors if x.device != device])
        if self.stage.visit:
            fetched |= self.taken_over(tuple([x for x in tensors if x.device == device]))
        return replaced(value, lambda x: fetched.get(id(x), x), copies)

    def taken_over(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Tensors of an earlier visit of this device for the stream of this one, by identity.

        Their gradients leave this stream as clones, since autograd may add others to them.
        """
        own = self.stage.compute
        self._record(tensors)
        known, missing = self._come.known(tensors)
        foreign = tuple([x for x in missing if needs_backward((x,)) and not self.has_made(x)])
        if foreign:
            with use_stream(own), labels.within(self.label):
                # guard: taking over from an earlier visit
                known |= self._come.added(foreign, wait(self.before, own, *foreign))
        return known

    def made(self, value: Any) -> None:
        """Take note of tensors that were computed in this visit."""
        for tensor in tensors_of(value):
            self._made[id(tensor)] = weakref.ref(tensor)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed in this visit."""
        found = self._made.get(id(tensor))
        return found is not None and found() is tensor

    def come(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Bring tensors here that are elsewhere, those of one device together, by identity."""
        fetched, missing = self._come.known(tensors)
        for device in dict.fromkeys(x.device for x in missing):
            originals = tuple([x for x in missing if x.device == device])
            if has_streams(device) and has_streams(self.stage.device):
                arrived = self._fetch_from(self._at(device), originals)
            else:
                # The host waits anyway.
                arrived = tuple([x.to(self.stage.device) for x in originals])
            fetched |= self._come.added(originals, arrived)
        return fetched

    def _fetch_from(self, source: Cell, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaving = source.send(tensors)
        self.step.goes(source.stage, self.stage)
        needed = any(x.requires_grad for x in leaving)
        # guard: join of what is fetched
        phonies = self._phonies() if needed else []
        # guard: lane of what is fetched
        with use_stream(self.lane):
            lanes = source.lane, self.lane
            function: Callable[..., tuple[Tensor, ...]] = partial(copy, *lanes, phonies=phonies)
            if self.step.recording is not None:
                stages = source.stage.number, self.stage.number
                function = self.step.recording.copying(function, lanes, stages, self.i)
            label = labels.of("copy", source.stage.number, self.i, self.stage.number)
            function = labels.around(function, label)
            arriving = function(*leaving)
        with use_stream(self.stage.compute), labels.within(self.label):
            arriving = wait(self.lane, self.stage.compute, *arriving)
        self._held |= needed
        if self.stage.visit:
            self.made(arriving)
        return arriving

    def bring(self, tensor: Tensor) -> Tensor:
        """Bring a tensor here anew, for code that may change it in place."""
        (arrived,) = self._fetch_from(self._at(tensor.device), (tensor,))
        return arrived

    def stay(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Fence what the model returns from here."""
        self._record(tensors)
        with use_stream(self.stage.compute), labels.within(self.label):
            return self._fenced(tensors)

    def _record(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of what an earlier visit has made."""
        if self.stage.visit:
            for tensor in tensors:
                # guard: recording for a later visit
                record_stream(tensor, self.stage.compute)

    def send(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Put tensors on the lane, from which other devices copy them."""
        sent, waiting = self._left.known(tensors)
        if waiting:
            compute = self.stage.compute
            self._record(waiting)
            with use_stream(compute), labels.within(self.label):
                leaving = leave(compute, self.lane, *waiting)
            label = labels.of("copy", self.stage.number, self.i)
            # guard: lane of what is sent on
            with use_stream(self.lane), labels.within(label):
                leaving = self._fenced(leaving, self.checkpoints)
            sent |= self._left.added(waiting, leaving)
        return tuple([sent[id(x)] for x in tensors])

    def _fenced(
        self, tensors: tuple[Tensor, ...], checkpoints: Sequence[Checkpoint] = ()
    ) -> tuple[Tensor, ...]:
        """Fence tensors, whose gradients trigger the recomputation of checkpoints."""
        if not (self.step.fenced and needs_backward(tensors)):
            return tensors
        if not self._held:
            # guard: join of what leaves
            tensors = join(tensors, *self._phonies())
        # guard: recomputation before the gradient
        if checkpoints:
            *outputs, phony = Recompute.apply(partial(_recompute, [*checkpoints]), *tensors)
            tensors = tuple(outputs)
        else:
            tensors, phony = fork(tensors)
        self.step.phonies.setdefault((self.i, self.stage), []).append(phony)
        return tensors

    def _phonies(self) -> list[Tensor]:
        """The phonies of the cells that backward shall come to after this one."""
        own, lead = self.stage, self.stage.lead
        found = self.step.phonies_before(self.i, own)
        for target in self.step.targets.get(own, ()):
            # guard: lead of a course
            if target.number - own.number < lead:
                found = found + self.step.phonies.get((self.i - lead, target), [])
        return found

    def close(self) -> None:
        """Let go of all tensors."""
        self._come.clear()
        self._left.clear()
        self.checkpoints.clear()


class Copies:
    """Copies of tensors that are somewhere else, by the identities of the originals."""

    def __init__(self) -> None:
        #: The original, which is held so that no other tensor has its identity, how often it had
        #: been changed in place, and the copy.
        self._found: dict[int, tuple[Tensor, int, Tensor]] = {}

    def get(self, tensor: Tensor) -> Tensor | None:
        """The copy of a tensor."""
        found = self._found.get(id(tensor))
        if found is None:
            return None
        _, version, copy = found
        now = version_of(tensor)
        # The tensor has changed since, or nobody counts its changes.
        # guard: copies of what has changed
        if version != now or now < 0:
            return None
        # A copy that was made without grad leads no gradient back.
        # guard: copies without grad
        if tensor.requires_grad and not copy.requires_grad and torch.is_grad_enabled():
            return None
        return copy

    def known(self, tensors: Iterable[Tensor]) -> tuple[dict[int, Tensor], list[Tensor]]:
        """The copies that there are, by the identities of the originals, and tensors without."""
        copies: dict[int, Tensor] = {}
        missing: dict[int, Tensor] = {}
        for tensor in tensors:
            known = self.get(tensor)
            if known is None:
                missing[id(tensor)] = tensor
            else:
                copies[id(tensor)] = known
        return copies, [*missing.values()]

    def added(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> dict[int, Tensor]:
        """Take note of copies, and return them by the identities of the originals."""
        for tensor, made in zip(tensors, copies):
            self._found[id(tensor)] = tensor, version_of(tensor), made
        return {id(tensor): made for tensor, made in zip(tensors, copies)}

    def clear(self) -> None:
        """Let go of all tensors."""
        self._found.clear()


def _recompute(checkpoints: Sequence[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        checkpoint.recompute()
