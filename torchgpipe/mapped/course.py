"""The idea: a micro-batch takes its course through the model, from device to device.

The model's own forward is called once for each micro-batch. Accelerators run behind the host, so
the host is done with a micro-batch long before the devices are. Each device sees its cells in the
order of the micro-batches, as under :class:`~torchgpipe.GPipe`::

    host       0 0 0 1 1 1 2 2 2             one call of the model for each micro-batch
    device 0   [0,0] [1,0] [2,0]
    device 1         [0,1] [1,1] [2,1]       consecutive modules on one device are one cell

What the model does, and what its course does then::

    calls a module     call     the cell on the module's device is entered;
                                arguments that are on other devices come there on lanes, with
                                the forks and joins of the fence;
                                the module runs, once or under a checkpoint
    runs other code    glue     a mode sees functions of PyTorch, and asks the course's cells
                                for their tensors on one device; the tail notes the functions
    returns            end      the last cell is left, and outputs come to their device

The obvious way, ``tensor.to(device)``, makes the current streams of both devices wait for each
other. Then no two micro-batches are computed at the same time. So
:class:`~torchgpipe.mapped.glue.Glue` replaces the copies that the model itself makes, too.

A model may come back to a device, as an encoder and a decoder over the same devices do. Each visit
is a stage of its own. All but the first compute on a stream of their own: on one stream, the next
micro-batch would wait for this one to come back. With ``threads``, each micro-batch has a host
thread, and :class:`~torchgpipe.mapped.threads.Turns` keep the order on each device; else there are
none. ``docs/glossary.rst`` has the words: course, fence, lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe.ambient import labels
from torchgpipe.ambient.context import current_hooks, is_in_checkpoint
from torchgpipe.ambient.modes import own_casts
from torchgpipe.ambient.notes import add_note, contextmanager, layer, note_layer, noted
from torchgpipe.devices.streams import has_streams, make_current, use_stream, wait_stream
from torchgpipe.engine.body import NOTHING
from torchgpipe.mapped.body import MappedBody, calling_by_name, current, inside
from torchgpipe.mapped.cell import Cell, CourseNumbers
from torchgpipe.mapped.containers import handing_back, tensors_of
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.exchanged import Exchanged, mappings_of
from torchgpipe.mapped.foreign import explain, watched
from torchgpipe.mapped.lazy_outputs import omissible
from torchgpipe.mapped.step import DeviceVisit, MappedStep
from torchgpipe.mapped.tail import Tail
from torchgpipe.mapped.threads import Turns
from torchgpipe.recompute.runs import is_verifying
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import Arguments

__all__: list[str] = []


class CourseCells:
    """The cells of one micro-batch: one for each visit of a device.

    A mapped module enters the cell on its device, which is the present one from then on. There are
    four ways to get a cell, for what has to be done on a device. What they give depends on the
    latest cell there::

                    for                      none yet   not entered   present   left
        present     what goes on here                                 it
        enter       a mapped module          begins     it            it        next visit
        go_on       code between modules     begins     it            it        next visit
        at          tensors that are there   begins     it            it        it

    A cell begins before it is entered where code between modules computes, or the caller has put
    tensors. A course that enters a cell waits for its turn there, and brings its RNG state along.
    """

    def __init__(self, step: MappedStep, i: int, turns: Turns | None) -> None:
        self._step, self._i, self._turns = step, i, turns
        if turns:
            # Code before the first mapped module computes on the first device: this needs a turn.
            turns.come(i, (step.devices[0], 0))
        self.present: Cell | None = None
        self._all: list[Cell] = []
        self._visited: list[torch.device] = []
        self._latest: dict[torch.device, Cell] = {}
        #: For each device that the micro-batch has come back to, its latest cell there. ``Glue``
        #: hands tensors of earlier visits of the device over to the stream of this cell.
        self.later: dict[torch.device, Cell] = {}
        self.numbers = CourseNumbers(step.numbers, i, step.devices, is_only=turns is None)

    def enter(self, device: torch.device, value: Any) -> Cell:
        """The cell for a mapped module on a device that is called with a value."""
        if self.present is not None and self.present.stage.device == device:
            return self.present
        latest = self._latest.get(device)
        if self._turns:
            # Sending forks phonies. The next micro-batch joins them, so that backward comes to it
            # first: send the arguments before this micro-batch gives up its turn.
            # guard: sending before others come
            leaving = [x for x in tensors_of(value) if x.device != device and has_streams(x.device)]
            for source in dict.fromkeys(x.device for x in leaving):
                self.at(source).send(tuple([x for x in leaving if x.device == source]))
            self.numbers.save()
            if self.present:
                self.present.offload()
                self._turns.leave(self._i)
            visit = latest.stage.visit + latest.entered if latest else 0
            self._turns.come(self._i, (device, visit))
        cell = self._begin(device) if latest is None or latest.entered else latest
        cell.entered = True
        self.present = cell
        self._visited.append(device)
        self.numbers.go_to(device)
        return cell

    def go_on(self, device: torch.device) -> Cell:
        """The cell for code between modules that computes on a device."""
        latest = self._latest.get(device)
        if latest is not None and latest.entered and latest is not self.present:
            # A new cell has a stream of its own. On that of the cell that was left, the code would
            # hold up the next micro-batch.
            # guard: code that comes back
            self._begin(device)
        return self.at(device)

    def at(self, device: torch.device) -> Cell:
        """The latest cell on a device, for tensors that are there."""
        return self._latest.get(device) or self._begin(device)

    def _begin(self, device: torch.device) -> Cell:
        before = self._latest.get(device)
        visit = before.stage.visit + 1 if before else 0
        cell = self._latest[device] = Cell(self._step, self._i, self._step.stage(device, visit))
        self._all.append(cell)
        if before:
            # Code between modules reads the earlier visit's tensors directly: the stream must wait.
            # guard: waiting for an earlier visit
            wait_stream(cell.stage.compute, before.stage.compute)
            # guard: streams of a later visit
            make_current(cell.stage.compute)
            cell.before = before.stage.compute
            self.later[device] = cell
        return cell

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor to another device on lanes, for code between mapped modules."""
        (arrived,) = self.go_on(device).receive(self.at(tensor.device), (tensor,))
        return arrived

    def together(self, tensors: Sequence[Tensor], target: torch.device | None) -> dict[int, Tensor]:
        """Copy tensors to one device, for code between mapped modules that uses them together.

        Args:
            tensors: the tensors. One that is on no device of the map is not copied.
            target: the device; None for that of the tensors' devices which was visited last, or, if
                none was, which is the last one in the map.

        Returns:
            The copies, by the identities of the originals.
        """
        devices = self._step.devices
        # PyTorch takes 0-dimensional tensors of the CPU on any device, so these are not copied.
        movable = [x for x in tensors if x.device in devices and (x.dim() or has_streams(x.device))]
        sources = {x.device for x in movable}
        if target is None and sources:
            target = next(x for x in reversed([*devices, *self._visited]) if x in sources)
        if target not in devices or sources <= {target}:
            return {}
        assert target is not None
        return self.go_on(target).fetch([x for x in movable if x.device != target], self.at)

    def end(self) -> None:
        """Leave the present device, when the model has returned."""
        if self.present:
            self.present.offload()
        if self._turns:
            # guard: leaving a device with its numbers
            self.numbers.save()
            self._turns.wait_for_end_before(self._i)

    def close(self) -> None:
        """Save the RNG state, and release all tensors."""
        self.numbers.end()
        self._step.drawn_behind |= self.numbers.drawn_behind
        for cell in self._all:
            cell.close()
        self._all.clear()
        self._latest.clear()
        self.later.clear()
        self.present = None


class Course:
    """Micro-batch ``i`` on its way through the model."""

    def __init__(self, step: MappedStep, i: int, turns: Turns | None = None) -> None:
        self.step, self.i = step, i
        self.cells = CourseCells(step, i, turns)
        #: The mapped module called last, which ``note()`` names in errors; None before any call.
        self._latest: Mapped | None = None
        #: Whether ``call()`` notes an error that is raised now, so that ``note()`` does not.
        self._noted = False
        #: The label of the thread's work before the course, which ``close()`` puts back.
        self._outer = labels.current.label
        #: The saved-tensor hooks before the course: others are those of a checkpoint of PyTorch.
        self._hooks = current_hooks()
        #: The torch-function mode for code between mapped modules; None if the step needs none.
        self.glue: TorchFunctionMode | None = None
        #: Notes functions called after the latest mapped module, which a recomputation calls again;
        #: None if this module is not recomputed, or cannot be the last one.
        self.tail: Tail | None = None

    def calling(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The function that calls the model, whose modules may have names on several devices."""
        return partial(calling_by_name, Counter(), model) if self.step.lasting.has_names else model

    def note(self, error: BaseException) -> None:
        """Add a note to what the model has raised, unless a mapped module did."""
        if not self._noted:
            last = self._latest
            where = f"after {last.words}" if last else "in front of the first mapped module"
            add_note(error, f"raised {where}, micro-batch {self.i}")

    def call(
        self, mapped: Mapped, module: nn.Module, inner: Callable[..., Any], value: tuple[Any, Any]
    ) -> Any:
        """Compute a mapped module on its device: enter the cell, fetch, compute."""
        if self.tail:
            self.tail.keep()
            self.tail = None
        if mapped.names:
            mapped = mapped.called(current.counts)
        self._latest, self._noted = mapped, True
        outer, layer.name = layer.name, None
        try:
            with inside(self.glue):
                before, cell = self.cells.present, self.cells.enter(mapped.device, value)
                if labels.observer is not None:
                    # The label stays after the call: code between modules is work of the cell, too.
                    labels.put(cell.label)
                body = self.step.body(cell.stage, mapped, module, inner)
                objects: list[Any] = []
                original = value
                value, copies = cell.arguments(value, self.cells.at, objects)
                if before is not None and before is not cell:
                    before.offload()
                try:
                    output = self._compute(mapped, cell, body, original, value, objects, copies)
                except RuntimeError as error:
                    explain(error, mapped, self.step.lasting.met)
                    raise
                if cell.stage.visit:
                    cell.made(output)
        except BaseException as error:
            # note_layer() adds the current layer, but this note names the module already.
            layer.name = None
            note_layer(error, self._note(mapped))
            raise
        finally:
            layer.name = outer
        self._noted = False
        return output

    def _note(self, mapped: Mapped) -> str:
        return f"raised in {mapped.words}, micro-batch {self.i}"

    def _items(self, cell: Cell, items: dict[Any, Any]) -> dict[Any, Any]:
        (_, fetched), _ = cell.arguments(((), items), self.cells.at)
        return {**fetched}

    def _compute(
        self,
        mapped: Mapped,
        cell: Cell,
        body: MappedBody,
        original: tuple[Any, Any],
        value: tuple[Any, Any],
        objects: list[Any],
        copies: list[Any],
    ) -> Any:
        """Run a module whose arguments are on its device, perhaps under checkpointing.

        Around the module's own call are, from the inside to the outside: values for later modules
        (``Exchanged``), tensors of other devices (``watched``), and the times of a trace. Around
        these is a checkpoint, or what lets saved tensors leave for the host.
        """
        step, stage = self.step, cell.stage
        again, within_checkpoint = self.i < body.checkpointed, is_in_checkpoint()
        if within_checkpoint:
            # A checkpoint of PyTorch in the model repeats this call in backward, and must see the
            # same tensors saved both times. A checkpoint of ours would hide them, so none is used.
            # guard: checkpoints around modules
            again = again and current_hooks() == self._hooks
        label = None if labels.observer is None else cell.label
        if label is not None:
            label = label._replace(layer=mapped.name, layer_type=type(body.layers).__name__)
        rare = label or within_checkpoint or (stage.visit and body.shared)
        with self._around(mapped, stage, body.shared, label) if rare else use_stream(stage.compute):
            if step.held is not None:
                step.held.verify(body.layers.modules())
            batch = Batch(Arguments(*value)) if again else None
            if batch is not None and any(x.device != stage.device for x in batch):
                # cell.arguments() leaves out objects of classes that only pytree knows. The
                # checkpoint takes their tensors, too, so these are copied here.
                (here, _), _ = cell.arguments(((*batch,), {}), self.cells.at)
                batch = batch.replace(here)
                value, copies = batch.value, [batch]
            run: Callable[..., Any] = (
                partial(body.run_twice, first_arguments=[value]) if again else body.run_alone
            )
            # Most calls have nothing but tensors and plain values, and need no search for mappings.
            if objects and (mappings := mappings_of(*value)):
                run = partial(Exchanged(mappings, partial(self._items, cell), body.lock).call, run)
            if body.foreign:
                bring = partial(cell.fetch, source=self.cells.at)
                run = watched(step.lasting.met, mapped, bring, run)
            if step.recording is not None:
                where = stage.compute, stage.number, stage.number, self.i
                run = partial(step.recording.run, run, where, iter if again else tensors_of)
            with handing_back(original, value) if copies else NOTHING:
                if batch is not None:
                    within = noted(self._note(mapped), label and label._replace(kind="R"))
                    checkpoint = body.checkpoint(run, step.new_context(), stage.compute, within)
                    cell.checkpoints.append(checkpoint)
                    # If this may be the last mapped module, the code after it is recomputed, too.
                    goes_on = step.lasting.last in (None, mapped.name) and self.glue is not None
                    goes_on = goes_on and current_hooks() is None and not is_verifying()
                    result = checkpoint.forward(body.kept(batch), batch, goes_on=goes_on)
                    if goes_on:
                        self.tail = Tail(checkpoint, result, body.omits)
                    output = result.value
                else:
                    if body.offloading is not None:
                        run = partial(cell.leaving(body.offloading).forward, run)
                    output = run(value)
            if step.held is not None:
                step.held.note(mapped.name, body.layers)
        return output

    @contextmanager
    def _around(
        self, mapped: Mapped, stage: DeviceVisit, shared: bool, label: labels.Label | None
    ) -> Iterator[None]:
        """The stream of a call, and the contexts that few calls need."""
        # Autocast caches weights that were cast on one visit's stream, and may free them at any
        # time. So a later visit that shares the module with another visit does without the cache.
        # guard: weights that were cast
        casts = own_casts() if stage.visit and shared else NOTHING
        undrawn = NOTHING
        if is_in_checkpoint():
            undrawn = self.cells.numbers.undrawn(mapped.name, stage.device)
        with use_stream(stage.compute), casts, undrawn, labels.within(label):
            yield

    def end(self, output: Any) -> Batch:
        """Finish the forward of the micro-batch: copy outputs to their device, and fence them."""
        batch = Batch(output)
        self.step.lasting.last = self._latest.name if self._latest else ""
        omitted = self._end_tail(output, batch)
        self.cells.end()
        # To be joined, an output goes to the output device, or where the micro-batch before has it.
        wanted = self.step.output_device
        targets = [wanted] * len(batch) if wanted else self.step.places
        if len(targets) == len(batch):
            moved = [
                x if x.device == target or id(x) in omitted else self.cells.move(x, target)
                for x, target in zip(batch, targets)
            ]
            batch = batch.replace(moved)
        self.step.places = [x.device for x in batch]
        outputs = {id(x): x for x in batch}
        for device in dict.fromkeys(x.device for x in batch):
            here = [x for x in batch if x.device == device]
            outputs |= dict(zip(map(id, here), self.cells.at(device).stay(tuple(here))))
        return self.step.omitted.without(self.i, batch.replace([outputs[id(x)] for x in batch]))

    def _end_tail(self, output: Any, batch: Batch) -> set[int]:
        """Drop the tensors that the tail has saved; return the identities of omitted outputs."""
        tail, step = self.tail, self.step
        if tail is None:
            return set()
        tensors = omissible(output, batch, tail) if tail.omits else []
        maker = tail.end([number for x in tensors if (number := tail.number(x)) is not None])
        if maker is None:
            return set()
        step.omitted.add(self.i, batch, tensors, maker)
        return {*map(id, tensors)}

    def close(self) -> None:
        """End the course, after a failure too, and release all tensors."""
        if labels.current.label is not self._outer:
            labels.put(self._outer)
        self.cells.close()
        # Glue refers to the course, too: only the garbage collector would free such a cycle.
        self.glue = self.tail = None
