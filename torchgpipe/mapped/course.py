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

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient.notes import add_note, noted
from torchgpipe.devices.streams import AbstractStream, make_current, use_stream, wait_stream
from torchgpipe.mapped.cell import Cell
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.step import MappedStep
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import Arguments

__all__: list[str] = []


class Course:
    """Micro-batch ``i`` on its way through the model.

    Args:
        step: the step.
        i: the number of the micro-batch.
    """

    def __init__(self, step: MappedStep, i: int) -> None:
        self.step, self.i = step, i
        #: Whether a mapped module is being computed.
        self.inside = False
        #: The cell that is on its way.
        self._cell: Cell | None = None
        #: The latest cell on each device.
        self._cells: dict[torch.device, Cell] = {}
        #: Where code between mapped modules is.
        self._place = "in front of the first mapped module"
        self._noted = False
        #: The streams of later visits, by device, once the model came back to one.
        self.own_streams: dict[torch.device, AbstractStream] = {}
        self._numbers: AbstractContextManager[Any] | None = None

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
        place = f"{mapped.name or 'the model'} on {mapped.device}"
        note = noted(f"raised in {place}, micro-batch {self.i}")
        self._noted = True
        with note:
            cell = self._enter(mapped.device)
            self.step.modules[cell.stage].add(mapped.module)
            args, kwargs = cell.fetch_all((args, kwargs))
            self.inside = True
            try:
                with use_stream(cell.stage.compute):
                    if self.step.is_checkpointed(self.i):
                        batch = Batch(Arguments(args, kwargs))
                        del args, kwargs
                        checkpoint = self._new_checkpoint(mapped, cell, note)
                        output = checkpoint.forward(batch.take()).value
                    else:
                        output = inner(*args, **kwargs)
            finally:
                self.inside = False
        self._noted, self._place = False, f"behind {place}"
        return output

    def _new_checkpoint(self, mapped: Mapped, cell: Cell, note: noted) -> Checkpoint:
        body = self.step.body(mapped)
        state = body.state
        assert state is not None
        checkpoint = Checkpoint(
            partial(body.run, copies=[]) if state.buffers.any else body.run,
            self.step.new_context(),
            cell.stage.compute,
            note,
            state.lasting,
            state.always_calls,
            state.shapes,
        )
        cell.checkpoints.append(checkpoint)
        return checkpoint

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Bring a tensor to another device, for code between mapped modules."""
        return self._at(device).fetch(tensor)

    def end(self, output: Any) -> Batch:
        """Fence the output of the model, and take the random numbers along."""
        batch = Batch(output)
        found = {id(x): x for x in batch}
        for device in dict.fromkeys(x.device for x in batch):
            here = [x for x in batch if x.device == device]
            found |= dict(zip(map(id, here), self._at(device).stay(tuple(here))))
        self._leave()
        return batch.replace([found[id(x)] for x in batch])

    def close(self) -> None:
        """End the course, after a failure too."""
        self._leave()

    def _enter(self, device: torch.device) -> Cell:
        """The cell of a module that is called on a device."""
        cell = self._cell
        if cell is None or cell.stage.device != device:
            found = self._cells.get(device)
            # What the caller has on a device, or what came there between modules, begins a cell,
            # too, which the first module goes on with.
            cell = self._begin(device) if found is None or found.entered else found
            cell.entered = True
            self._leave()
            self._cell = cell
            self._numbers = self.step.numbers.of(self.i, device)
            self._numbers.__enter__()
        return cell

    def _leave(self) -> None:
        if self._numbers is not None:
            self._numbers.__exit__(None, None, None)
            self._numbers = None

    def _at(self, device: torch.device) -> Cell:
        """The latest cell on a device."""
        return self._cells.get(device) or self._begin(device)

    def _begin(self, device: torch.device) -> Cell:
        before = self._cells.get(device)
        visit = before.stage.visit + 1 if before else 0
        cell = self._cells[device] = Cell(
            self.step, self.i, self.step.stage(device, visit), self._at
        )
        if before:
            # Code between modules computes on the device, too, with whatever is there.
            wait_stream(cell.stage.compute, before.stage.compute)
            make_current(cell.stage.compute)
            self.own_streams[device] = cell.stage.compute
        return cell
