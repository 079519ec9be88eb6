"""The idea: a micro-batch takes its course through the model, from device to device.

The model's own forward is called once for each micro-batch. Accelerators run behind the host, so
the host is done with a micro-batch long before the devices are. Each device sees its cells in the
order of the micro-batches, as under :class:`~torchgpipe.GPipe`::

    host       0 0 0 1 1 1 2 2 2             one call of the model for each micro-batch
    device 0   [0,0] [1,0] [2,0]
    device 1         [0,1] [1,1] [2,1]       consecutive modules on one device are one cell

A course knows which cell is on its way. When a module on another device is called, the next cell
begins, and the tensors that the module is called with come there on lanes. The obvious way,
``tensor.to(device)``, makes the current streams of both devices wait for each other. Then no two
micro-batches are computed at the same time. So :class:`~torchgpipe.mapped.glue.Glue` sees to the
copies that the model makes itself, between its modules.

A model may come back to a device, as an encoder and a decoder over the same devices do. Each visit
is a stage of its own. All but the first compute on a stream of their own: on one stream, the next
micro-batch would wait for this one to come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient import labels
from torchgpipe.ambient.backward import Visit
from torchgpipe.ambient.context import is_in_checkpoint
from torchgpipe.ambient.notes import add_note, noted
from torchgpipe.ambient.thread import registered
from torchgpipe.devices.streams import has_streams, make_current, use_stream, wait_stream
from torchgpipe.engine.body import Body, starts_in_place
from torchgpipe.engine.recorded import Where
from torchgpipe.mapped.attributes import Given
from torchgpipe.mapped.cell import Cell
from torchgpipe.mapped.containers import lists_and_dicts, tensors_of, unfilled
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.exchanged import Exchanged, mappings_of
from torchgpipe.mapped.numbers import CourseNumbers
from torchgpipe.mapped.step import MappedStep
from torchgpipe.mapped.turns import Turns
from torchgpipe.recompute.buffers import Copy
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.recompute.phase import is_recomputing
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.structure import Arguments

if TYPE_CHECKING:
    from torchgpipe.mapped.glue import Glue

__all__: list[str] = []


class Inside:
    """A mark in place of a course: a mapped module is being computed, as a whole."""


INSIDE = Inside()


class Current(threading.local):
    """The course that a thread takes."""

    course: Course | Inside | None = None
    glue: Glue | None = None


current = registered(Current())

NOTHING: AbstractContextManager[None] = nullcontext()


class inside:
    """Compute a mapped module as a whole, whatever it calls, within a ``with`` block."""

    def __enter__(self) -> None:
        self._outer, current.course = current.course, INSIDE

    def __exit__(self, *_: object) -> None:
        current.course = self._outer


class Course:
    """Micro-batch ``i`` on its way through the model.

    Args:
        step: the step.
        i: the number of the micro-batch.
        turns: the order of courses on their way at the same time; None if there is one at a time.
    """

    def __init__(self, step: MappedStep, i: int, turns: Turns | None = None) -> None:
        self.step, self.i = step, i
        self._turns = turns
        if turns:
            # Code in front of the first mapped module computes there.
            turns.come(i, (step.devices[0], 0))
        #: The cell that is on its way.
        self._cell: Cell | None = None
        self._all: list[Cell] = []
        #: The devices to which the model came, in order.
        self._way: list[torch.device] = []
        #: The latest cell on each device.
        self._cells: dict[torch.device, Cell] = {}
        #: Where code between mapped modules is.
        self._place = "in front of the first mapped module"
        self._noted = False
        #: The label of what the thread computes besides.
        self._outer = labels.current.label
        #: The cells of later visits, by device, once the model came back to one.
        self.later: dict[torch.device, Cell] = {}
        self._numbers = CourseNumbers(step.numbers, i, step.devices, alone=turns is None)

    def note(self, error: BaseException) -> None:
        """Add a note to what the model has raised, unless a mapped module did."""
        if not self._noted:
            add_note(error, f"raised {self._place}, micro-batch {self.i}")

    def call(self, mapped: Mapped, inner: Any, args: Any, kwargs: Any) -> Any:
        """Compute a mapped module on its device.

        Args:
            mapped: the module.
            inner: calls the module's own forward, with its hooks.
            args: the arguments of the call.
            kwargs: likewise.
        """
        note = noted(f"raised in {mapped.place}, micro-batch {self.i}")
        self._noted = True
        with note:
            cell = self._enter(mapped.device, (args, kwargs))
            if (label := cell.label) is not None:
                # Code behind the module belongs to the cell, too.
                labels.put(label)
                label = label._replace(layer=mapped.name, layer_type=type(mapped.module).__name__)
            self.step.enters(mapped.module, cell.stage)
            inner = self.step.lending(mapped, cell.stage, inner)
            undrawn: AbstractContextManager[None] = NOTHING
            if is_in_checkpoint():
                undrawn = self._numbers.undrawn(mapped.name, mapped.device)
            copies: list[Any] = []
            args, kwargs = cell.fetch_all((args, kwargs), copies)
            exchanged = None
            if mappings := mappings_of(args, kwargs):
                fetch = partial(cell.fetch_all, copies=[])
                exchanged = Exchanged(mappings, fetch, self.step.lock)
            uncached = self.step.uncached(mapped.module, cell.stage)
            with use_stream(cell.stage.compute), uncached, undrawn, labels.within(label):
                attributes = self.step.attributes(mapped.module)
                given = None if attributes is None else attributes.begin()
                if self.step.is_checkpointed(self.i):
                    batch = Batch(Arguments(args, kwargs))
                    del args, kwargs
                    again = noted(note.note, None if label is None else label._replace(kind="R"))
                    around = None if exchanged is None else exchanged.call
                    checkpoint = self._new_checkpoint(mapped, inner, cell, again, given, around)
                    output = _first_run(checkpoint, batch.take(), mapped.module).value
                else:
                    if self.step.is_visited(mapped.module):
                        tensors = tensors_of((args, kwargs))
                        visit = Visit(mapped.module, tensors, tuple, str(note.note))
                        inner = partial(_visited, visit, inner)
                    if exchanged is not None:
                        inner = partial(exchanged.call, inner)
                    if self.step.recording is not None:
                        inner = self._recorded(inner, cell)
                    # Another container than the one of keyword arguments itself.
                    copies = [x for x in copies if x is not kwargs]
                    with unfilled(mapped.name, copies) if copies else NOTHING, inside():
                        output = inner(*args, **kwargs)
                if attributes is not None and given is not None:
                    attributes.end(given)
        if cell.stage.visit:
            cell.made(output)
        self._noted, self._place = False, f"behind {mapped.place}"
        return output

    def _new_checkpoint(
        self,
        mapped: Mapped,
        inner: Any,
        cell: Cell,
        note: noted,
        given: Given | None,
        around: Callable[..., Any] | None,
    ) -> Checkpoint:
        body = self.step.body(mapped, partial(_filling_nothing, mapped.name, inner), cell.stage)
        run: Callable[..., Batch] = partial(_run, body, given, starts_in_place(mapped.module))
        if self.step.is_visited(mapped.module):
            run = partial(run, note=str(note.note))
        if around is not None:
            # The body is that of all micro-batches.
            run = partial(around, run)
        if self.step.recording is not None:
            run = self.step.recording.around(run, self._where(cell))
        checkpoint = body.checkpoint(run, self.step.new_context(), cell.stage.compute, note)
        cell.checkpoints.append(checkpoint)
        return checkpoint

    def _recorded(self, inner: Any, cell: Cell) -> Any:
        """Call a mapped module, and record it for somebody who traces the model."""
        recording = self.step.recording
        assert recording is not None

        def run(arguments: tuple[Any, Any]) -> Any:
            return inner(*arguments[0], **arguments[1])

        around = recording.around(run, self._where(cell), tensors_of)
        return lambda *args, **kwargs: around((args, kwargs))

    def _where(self, cell: Cell) -> Where:
        return cell.stage.compute, cell.stage.number, cell.stage.number, self.i

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Bring a tensor to another device, for code between mapped modules."""
        return self._goes_on(device).bring(tensor)

    def together(self, tensors: Sequence[Tensor], target: torch.device | None) -> dict[int, Tensor]:
        """Bring tensors together that code between mapped modules uses together.

        Args:
            tensors: the tensors. What is on no device of the map stays there.
            target: the device; None for the one of theirs that the model came to last.

        Returns:
            The tensors that came, by the identities of the originals.
        """
        devices = self.step.devices
        # PyTorch uses a number of the CPU on any device.
        own = [x for x in tensors if x.device in devices and (x.dim() or has_streams(x.device))]
        places = {x.device for x in own}
        if target is None and places:
            # Before the first module it is the last one of the map.
            target = next(x for x in reversed([*devices, *self._way]) if x in places)
        if target not in devices or places <= {target}:
            return {}
        assert target is not None
        return self._goes_on(target).come([x for x in own if x.device != target])

    def _goes_on(self, device: torch.device) -> Cell:
        """The cell on a device for code that goes on there with something that comes late."""
        found = self._cells.get(device)
        if found is not None and found.entered and found is not self._cell:
            # On the stream of an earlier visit the next micro-batch would wait for it.
            # guard: code that comes back
            self._begin(device)
        return self._at(device)

    def end(self, output: Any) -> Batch:
        """Fence the output of the model."""
        batch = Batch(output)
        if self._turns:
            # guard: leaving a device with its numbers
            self._numbers.leave()
            self._turns.wait_for_end_before(self.i)
        # Micro-batches may end on different devices, by their values.
        places = self.step.places
        if len(places) == len(batch):
            moved = [
                x if x.device == place else self.move(x, place) for x, place in zip(batch, places)
            ]
            batch = batch.replace(moved)
        self.step.places = [x.device for x in batch]
        found = {id(x): x for x in batch}
        for device in dict.fromkeys(x.device for x in batch):
            here = [x for x in batch if x.device == device]
            found |= dict(zip(map(id, here), self._at(device).stay(tuple(here))))
        return batch.replace([found[id(x)] for x in batch])

    def close(self) -> None:
        """End the course, after a failure too, and let go of all tensors."""
        if labels.current.label is not self._outer:
            labels.put(self._outer)
        self._numbers.end()
        self.step.drawn_behind |= self._numbers.drawn_behind
        for cell in self._all:
            cell.close()
        # The cells refer to the course, too, and the step has the phonies of the whole graph.
        self._all.clear()
        self._cells.clear()
        self.later.clear()
        self._cell = None

    def _enter(self, device: torch.device, value: Any) -> Cell:
        """The cell of a module that is called on a device, with a value."""
        cell = self._cell
        if cell is None or cell.stage.device != device:
            found = self._cells.get(device)
            if self._turns:
                self._take_turn(device, found, value)
            # What the caller has on a device, or what came there between modules, begins a cell,
            # too, which the first module goes on with.
            cell = self._begin(device) if found is None or found.entered else found
            cell.entered = True
            self._cell = cell
            self._way.append(device)
            self._numbers.go_to(device)
        return cell

    def _take_turn(self, device: torch.device, found: Cell | None, value: Any) -> None:
        assert self._turns
        # The next micro-batch needs the phonies of what leaves.
        # guard: sending before others come
        leaving = [x for x in tensors_of(value) if x.device != device and has_streams(x.device)]
        for source in dict.fromkeys(x.device for x in leaving):
            self._at(source).send(tuple([x for x in leaving if x.device == source]))
        self._numbers.leave()
        if self._cell:
            self._turns.leave(self.i)
        visit = found.stage.visit + found.entered if found else 0
        self._turns.come(self.i, (device, visit))

    def _at(self, device: torch.device) -> Cell:
        """The latest cell on a device."""
        return self._cells.get(device) or self._begin(device)

    def _begin(self, device: torch.device) -> Cell:
        before = self._cells.get(device)
        visit = before.stage.visit + 1 if before else 0
        cell = self._cells[device] = Cell(
            self.step, self.i, self.step.stage(device, visit), self._at
        )
        self._all.append(cell)
        if before:
            # Code between modules computes on the device, too, with whatever is there.
            # guard: waiting for an earlier visit
            wait_stream(cell.stage.compute, before.stage.compute)
            # guard: streams of a later visit
            make_current(cell.stage.compute)
            cell.before = before.stage.compute
            self.later[device] = cell
        return cell


def _filling_nothing(name: str, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a mapped module with containers that are copies."""
    with unfilled(name, lists_and_dicts((args, *kwargs.values()))):
        return inner(*args, **kwargs)


def _visited(visit: Visit, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a mapped module, and visit the nodes that it adds to the graph."""
    with visit:
        output = inner(*args, **kwargs)
        visit.visit(*tensors_of(output))
    return output


def _first_run(checkpoint: Checkpoint, batch: Batch, module: nn.Module) -> Batch:
    """Run a mapped module for the first time.

    The model may use what a layer with ``inplace=True`` has changed, so the layer gets that and no
    clone, which is for the second run.
    """
    if not starts_in_place(module):
        return checkpoint.forward(batch)
    return checkpoint.forward(_cloned(batch), batch)


def _cloned(batch: Batch) -> Batch:
    return batch.map(lambda *xs: [x.clone() for x in xs], [VALUE])


def _run(
    body: Body,
    given: Given | None,
    in_place: bool,
    batch: Batch,
    copies: list[Copy] | None = None,
    note: str = "",
) -> Batch:
    """Run a mapped module, for the first or the second time."""
    if in_place and is_recomputing():
        # A leaf, as the input of a second run is one, cannot be changed.
        batch = _cloned(batch)
    # Most models store nothing.
    if given is not None and (given.keys or given.deep) and is_recomputing():
        # Modules of several devices may share what is within their attributes.
        # guard: contents of several devices
        with body.lock, given.restored(), inside():
            return body.run(batch, copies)
    with inside():
        return body.run(batch, copies, note)
