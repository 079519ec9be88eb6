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
:mod:`torchgpipe.engine.cell`. What differs is that it is unknown beforehand which tensors go to
which device. A tensor leaves when a module on another device is called with it. It is copied to a
device once, however many modules there are called with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient import labels
from torchgpipe.ambient.generators import content, generator_of, get_state, set_state
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.ambient.random_numbers import CellNumbers, StepNumbers
from torchgpipe.autograd.copy import leave, wait
from torchgpipe.autograd.fork_join import join, needs_backward
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import has_streams, record_stream, use_stream
from torchgpipe.engine.lanes import carried
from torchgpipe.mapped.containers import map_arguments, tensors_of
from torchgpipe.mapped.step import DeviceVisit, MappedStep
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.recompute.offload import Offloaded, Offloading

__all__: list[str] = []


class Cell:
    """Micro-batch ``i`` in one stage."""

    def __init__(self, step: MappedStep, i: int, stage: DeviceVisit) -> None:
        self.step, self.i, self.stage = step, i, stage
        #: The compute stream of the device's previous visit, from which ``taken_over()`` hands
        #: tensors over to this cell's stream; in the first visit, the cell's own stream.
        self.before = stage.compute
        #: Whether a mapped module was called here: if so, a course that returns begins a new cell.
        self.entered = False
        #: The copy stream (lane) on which tensors arrive and leave.
        self.lane = stage.lanes[i % len(stage.lanes)]
        self.checkpoints: list[Checkpoint] = []
        #: The ``Offloading`` of each module called so far that has one. ``offload()`` has them move
        #: saved tensors to the host's memory after the last module of the cell.
        self._leaving: list[Offloading] = []
        #: For the id() of each tensor made in a second or further visit: a reference to the tensor,
        #: which ``taken_over()`` leaves as it is, since it belongs to this visit's stream.
        self._made: dict[int, weakref.ref[Tensor]] = {}
        #: ``_come`` has the copies of tensors that this cell has received or taken over, ``_left``
        #: the clones of tensors that it has sent to other devices.
        self._come, self._left = Copies(), Copies()
        #: Whether ``receive()`` has joined phonies, which order backward (see ``engine/pipeline``),
        #: to a tensor that needs a gradient. If not, ``_fenced()`` joins them to what leaves.
        self._held = False

    @property
    def label(self) -> labels.Label | None:
        """The label of the work of this cell; None without an observation."""
        return labels.of("F", self.stage.number, self.i)

    def known(self, missing: list[Tensor], tensor: Tensor) -> Tensor:
        """The tensor, or its copy, on this device; the tensor itself if it has to be fetched.

        Args:
            missing: a list to which a tensor that has to be fetched is added.
            tensor: a tensor on any device.
        """
        stage = self.stage
        if not stage.visit:
            copy = self._come.get(tensor)
            if copy is not None:
                return copy
            if tensor.device == stage.device:
                return tensor
        missing.append(tensor)
        return tensor

    def arguments(
        self, value: Any, source: Callable[[torch.device], Cell], objects: list[Any] | None = None
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """Copy the arguments of a call, ``(args, kwargs)``, to this device.

        Returns:
            The arguments, and the lists and dicts in them that are copies.
        """
        copies: list[Any] = []
        missing: list[Tensor] = []
        arguments = map_arguments(partial(self.known, missing), value, copies, objects)
        # Most calls skip this: arguments are on this device, or were copied for an earlier module.
        if missing:
            copies.clear()
            fetched = self.fetch(tensors_of(value), source)
            arguments = map_arguments(lambda x: fetched.get(id(x), x), value, copies)
        return arguments, copies

    def fetch(
        self, tensors: Sequence[Tensor], source: Callable[[torch.device], Cell]
    ) -> dict[int, Tensor]:
        """Copy tensors to this device, those of one device together, each once.

        Returns:
            The tensors here, by the identities of the originals.
        """
        device_here = self.stage.device
        fetched, missing = self._come.known([x for x in tensors if x.device != device_here])
        for device in dict.fromkeys(x.device for x in missing):
            originals = tuple([x for x in missing if x.device == device])
            if has_streams(device) and has_streams(device_here):
                arrived = self.receive(source(device), originals)
            else:
                # No copy stream is used, since the host waits for a copy from or to the CPU anyway.
                arrived = tuple([x.to(device_here) for x in originals])
            fetched |= self._come.added(originals, arrived)
        if self.stage.visit:
            fetched |= self.taken_over([x for x in tensors if x.device == device_here])
        return fetched

    def taken_over(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Hand tensors of an earlier visit of this device over to this cell's stream.

        They are returned by the identities of the originals. Their gradients leave this stream as
        clones, since autograd may add others to them.
        """
        compute = self.stage.compute
        self._record(tensors)
        known, missing = self._come.known(tensors)
        foreign = tuple([x for x in missing if needs_backward((x,)) and not self.has_made(x)])
        if foreign:
            with use_stream(compute), labels.within(self.label):
                # guard: taking over from an earlier visit
                known |= self._come.added(foreign, wait(self.before, compute, *foreign))
        return known

    def made(self, value: Any) -> None:
        """Take note of tensors that were computed in this visit."""
        for tensor in tensors_of(value):
            self._made[id(tensor)] = weakref.ref(tensor)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed in this visit."""
        reference = self._made.get(id(tensor))
        return reference is not None and reference() is tensor

    def receive(self, source: Cell, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy tensors to this device on lanes, from the cell on their device."""
        leaving = source.send(tensors)
        there, here, fence = source.stage, self.stage, self.step.fence
        needed = any(x.requires_grad for x in leaving)
        phonies: list[Tensor] = []
        if fence:
            fence.ahead[there.number][here.number] = there.lead_of(here)
            # guard: join of what is fetched
            phonies = fence.before(self.i, here.number) if needed else []
        # guard: lane of what is fetched
        with use_stream(self.lane):
            way = (source.lane, self.lane), (there.number, here.number), self.i
            arriving = carried(*way, self.step.recording, phonies, *leaving)
        with use_stream(self.stage.compute), labels.within(self.label):
            arriving = wait(self.lane, self.stage.compute, *arriving)
        self._held |= needed
        if self.stage.visit:
            self.made(arriving)
        return arriving

    def stay(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Fence the outputs of the model that are on this device."""
        self._record(tensors)
        with use_stream(self.stage.compute), labels.within(self.label):
            return self._fenced(tensors)

    def _record(self, tensors: Iterable[Tensor]) -> None:
        """Keep memory of an earlier visit from being reused before this stream is done with it."""
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
                # guard: recomputation before the gradient
                leaving = self._fenced(leaving, self.checkpoints)
            sent |= self._left.added(waiting, leaving)
        return tuple([sent[id(x)] for x in tensors])

    def _fenced(
        self, tensors: tuple[Tensor, ...], checkpoints: Sequence[Checkpoint] = ()
    ) -> tuple[Tensor, ...]:
        """Join and fork tensors for the fence; their gradients trigger recomputation."""
        fence, j = self.step.fence, self.stage.number
        if fence is None or not needs_backward(tensors):
            return tensors
        if not self._held:
            # guard: join of what leaves
            tensors = join(fence.before(self.i, j), *tensors)
        return fence.fork(self.i, j, checkpoints, *tensors)

    def leaving(self, offloading: Offloading) -> Offloaded:
        """Make what moves the tensors that modules of this cell save to the host's memory."""
        if offloading not in self._leaving:
            self._leaving.append(offloading)
        return offloading.cell(self.stage.compute, self.i)

    def offload(self) -> None:
        """Move what was saved to the host's memory, once the last module of the cell has run."""
        if self._leaving:
            offloadings, self._leaving = self._leaving, []
            with use_stream(self.stage.compute):
                for offloading in offloadings:
                    offloading.offload()

    def close(self) -> None:
        """Let go of all tensors."""
        self._leaving = []
        self._come, self._left = Copies(), Copies()
        self.checkpoints.clear()


class Copies:
    """A table of copies of tensors, by the identities of the originals."""

    def __init__(self) -> None:
        #: For the id() of each original: the original, held so that no other tensor gets its id();
        #: its version, which shows whether it has changed since; and its copy.
        self._entries: dict[int, tuple[Tensor, int, Tensor]] = {}

    def get(self, tensor: Tensor) -> Tensor | None:
        """The valid copy of a tensor; None if there is none."""
        entry = self._entries.get(id(tensor))
        if entry is None:
            return None
        _, version, copy = entry
        # guard: copies of what has changed
        if version != tensor._version:
            return None
        # With grad mode on, a copy made without it is not valid, since it passes no gradient back.
        # guard: copies without grad
        if tensor.requires_grad and not copy.requires_grad and torch.is_grad_enabled():
            return None
        return copy

    def known(self, tensors: Iterable[Tensor]) -> tuple[dict[int, Tensor], list[Tensor]]:
        """The valid copies, by the identities of the originals, and the tensors that have none."""
        copies: dict[int, Tensor] = {}
        missing: dict[int, Tensor] = {}
        for tensor in tensors:
            copy = self.get(tensor)
            if copy is None:
                missing[id(tensor)] = tensor
            else:
                copies[id(tensor)] = copy
        return copies, [*missing.values()]

    def added(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> dict[int, Tensor]:
        """Take note of copies, and return them by the identities of the originals."""
        for tensor, made in zip(tensors, copies):
            # Copies of inference tensors are not noted: without a version, nothing shows a change.
            if (version := version_of(tensor)) >= 0:
                self._entries[id(tensor)] = tensor, version, made
        return {id(tensor): made for tensor, made in zip(tensors, copies)}


class CourseNumbers:
    """The generators while the course of a micro-batch runs.

    A micro-batch continues its random sequence from device to device, as under
    :class:`~torchgpipe.GPipe`, so dropout does not depend on the map.

    Args:
        numbers: the RNG states of the step.
        i: the number of the micro-batch.
        devices: all devices of the map; code in front of the first mapped module is taken to
            compute on the first of them.
        is_only: whether no other course runs at the same time. Otherwise draws are followed only
            on the device where the course is.
    """

    def __init__(
        self, numbers: StepNumbers, i: int, devices: Sequence[torch.device], is_only: bool = True
    ) -> None:
        self._numbers, self._i = numbers, i
        self._states = numbers.states[i]
        self._all = [*dict.fromkeys(map(generator_of, devices))]
        #: The generators watched for draws; empty if courses in other threads draw from them, too.
        self._generators = self._all if is_only else []
        #: Whether code has drawn random numbers on a device while the course was on another one.
        #: With several threads, such code might draw the numbers of another micro-batch.
        self.drawn_behind = False
        #: For each generator's device, the state seen last: another state shows a draw since then.
        self._known: dict[torch.device, Tensor] = {}
        for device in self._generators:
            self._known[device] = self._states[device.type]
            set_state(device, self._known[device])
        self._here: CellNumbers | None = None
        self.go_to(devices[0])

    def go_to(self, device: torch.device) -> None:
        """Set the course's RNG state on a device, and save it from the one before."""
        self.save()
        here = self._numbers.of(self._i, device)
        self._look(here.device)
        here.__enter__()
        self._here = here

    def end(self) -> None:
        """Save the RNG state, also where code has drawn on another device."""
        self.save()
        for device in self._generators:
            self._look(device)

    def save(self) -> None:
        """Save the RNG state of the present device, and let go of its generator."""
        here = self._here
        if here is not None:
            here.__exit__()
            self._known[here.device] = self._states[here.kind]
            self._here = None

    def _look(self, device: torch.device) -> None:
        if self._generators:
            state = get_state(device)
            if content(state) != content(self._known[device]):
                self._states[device.type] = self._known[device] = state
                self.drawn_behind = True

    @contextmanager
    def undrawn(self, name: str, device: torch.device) -> Iterator[None]:
        """Check that a module in a checkpoint of PyTorch draws nothing if accelerators are several.

        In backward each accelerator has a thread. Such a checkpoint sets the generators of all
        devices that its arguments are on, which other threads draw from at the same time.

        Raises:
            RuntimeError: the module drew numbers.
        """
        generator = generator_of(device)
        several = sum(x.type == generator.type for x in self._all) > 1
        before = get_state(generator) if several else None
        yield
        if before is not None and content(before) != content(get_state(generator)):
            raise RuntimeError(
                "a checkpoint of PyTorch cannot repeat random numbers while several devices run "
                f"backward (module: {name}, device: {device}); use the checkpoints of MappedGPipe "
                "instead of the model's own, or switch dropout off"
            )
