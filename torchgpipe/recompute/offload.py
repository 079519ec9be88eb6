"""Offloading: what a cell saves for backward is in the memory of the host until it is due.

::

    compute   F0 ── F1 ── F2 ── F3 ── B3 ── B2 ── B1 ── B0
                ╲  ↗  ╲  ↗             │   ↗ │   ↗
    out          0     1              [1] ╱ [1] ╱
                 ┊     ┊               ↓ ╱   ↓ ╱
    back         ┊     ┊               1     0
              memory of the host

A cell leaves (D2H, *out*) when its layers have run, after one event. The compute stream waits for
the copy only after the layers of the next cell, as with a double buffer, and then the memory is
free. The obvious way, ``record_stream``, would have it wait as long, and hold the memory for one
cell more.

The last two micro-batches stay, by the rule of :mod:`~torchgpipe.schedule.trips`. Keeping one
more than the last takes no more memory.

A cell comes back (H2D, *back*) when backward asks for the first tensor of the cell after it [1], so
its prefetch distance is one cell, unless a schedule says more. The memory it comes to is new memory
of the compute stream. So the copy waits for what that stream has been given so far, and comes no
earlier than needed. The cell's own layers wait for the copy when they ask for their first tensor.

What somebody else holds stays, since the memory would not be free: outputs, the caller's
mini-batch, what a layer keeps. It is looked for when the layers have run. Autograd does not compare
versions behind hooks, so they are compared here: when the layers have run, and when backward asks.

Sources: Megatron-LM's fine-grained offloading; Wan et al., PipeOffload (arXiv 2503.01328).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient import labels
from torchgpipe.ambient.context import current_hooks
from torchgpipe.devices.pool import HostMemory
from torchgpipe.devices.recorder import Mark, Recorder
from torchgpipe.devices.streams import (
    AbstractStream,
    Event,
    get_device,
    is_current,
    record,
    use_stream,
    wait_for,
)
from torchgpipe.partition.keeping import Offload
from torchgpipe.recompute.slots import explain_hooks, modified
from torchgpipe.recompute.storage import Storage, View, is_held, sent, storage_bytes, storage_key

__all__: list[str] = []


class Window:
    """The double buffer of a compute stream: cells that leave are gone one instruction later."""

    def __init__(self) -> None:
        self._now: list[Offloaded] = []
        self._before: list[Offloaded] = []

    def leaves(self, cell: Offloaded) -> None:
        """Take note of a cell whose copies out come after the instruction that was issued last."""
        self._now.append(cell)

    def passed(self) -> None:
        """Take note of an instruction that was issued: free the cells that left before it."""
        gone, self._before, self._now = self._before, self._now, []
        for cell in gone:
            cell.let_go()


class Offloading:
    """The offloading of one partition in a step, whose cells leave, and come back, in turns.

    Args:
        memory: the memory of the host, and the streams that copy. What the CPU keeps is there
            anyway, so its partitions have no offloading.
        offload: how much leaves, and when it comes back.
        j: the number of the partition.
        leaving: the micro-batches that leave.
        recorder: takes the times of copies, if somebody traces the model.
        window: the window of the compute stream, if other partitions have it, too. Then a schedule
            says when cells come back.
    """

    def __init__(
        self,
        memory: HostMemory,
        offload: Offload,
        j: int,
        leaving: Container[int],
        recorder: Recorder | None,
        window: Window | None = None,
    ) -> None:
        self.memory, self.j, self.recorder = memory, j, recorder
        self._share, self._leaving = offload.share, leaving
        self._is_scheduled, self.window = window is not None, window or Window()
        #: The cell whose layers run; None until cell() has made it.
        self._present: Offloaded | None = None
        #: The cell made last, which the cell made next fetches in backward. None under a schedule.
        self._last: Offloaded | None = None

    def sends(self, i: int) -> bool:
        """Whether micro-batch ``i`` leaves."""
        return i in self._leaving

    def cell(self, stream: AbstractStream, i: int) -> Offloaded:
        """The cell that runs, which is made when somebody asks for it."""
        cell = self._present
        if cell is None:
            share = self._share if self.sends(i) else 0.0
            cell = self._present = Offloaded(self, stream, i, share, self._last)
            if not self._is_scheduled:
                self._last = cell
        return cell

    def offload(self) -> Offloaded | None:
        """Copy out what the cell has saved, once its output was handed on, and return the cell.

        Here the compute stream waits for the copies of the cell before. The receiver of the output
        does not, since the output was handed on first.
        """
        cell, self._present = self._present, None
        if cell is not None:
            cell.send()
            self.window.leaves(cell)
        # Under a schedule, the executor calls Window.passed() after each instruction.
        if not self._is_scheduled:
            self.window.passed()
        return cell

    def end(self) -> None:
        """Take note that all cells have run."""
        self._last = None
        self.window.passed()


class Offloaded:
    """One cell, whose saved tensors leave, come back, and are rebuilt when backward asks.

    It takes the place of a :class:`~torchgpipe.recompute.checkpoint.Checkpoint`.
    """

    def __init__(
        self,
        offloading: Offloading,
        stream: AbstractStream,
        i: int,
        share: float,
        before: Offloaded | None,
    ) -> None:
        self._is_over = False
        self.stream, self._share, self._before = stream, share, before
        self._memory, self._recorder = offloading.memory, offloading.recorder
        self._way = offloading.j, i
        #: For each storage_key(), the saved tensors that have it. Those with 0 stay on the device.
        self._views: dict[int, list[ref[View]]] = {}
        #: The storages that were copied out, until the compute stream waits for the copies back.
        self._storages: list[Storage] = []
        #: The event after the last copies of `_storages`, to the host or back; None without any.
        self._copied: Event | None = None
        #: Whether the device memory of `_storages` was freed, so that fetch() must take new memory.
        self._has_left = False
        #: `_wanted`: fetch() was called, so let_go() frees nothing. `_begun`: begin() was called.
        self._wanted = self._begun = False

    def forward(self, run: Callable[[Any], Any], value: Any) -> Any:
        """Run layers of the cell on a value, and have saved tensors leave, unless they stay."""
        if current_hooks() is not None:
            # The caller's own hooks decide where saved tensors are kept, so none leaves from here.
            return run(value)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                return run(value)
        except RuntimeError as error:
            explain_hooks(error)
            raise

    @uncompiled
    def _pack(self, tensor: Tensor) -> View:
        view = View(tensor)
        if self._share:
            # A tensor saved on a side stream stays: its copy would not wait for that stream.
            # guard: layers with a stream of their own
            key = storage_key(tensor, get_device(self.stream)) if is_current(self.stream) else 0
            # A weak reference: a tensor whose graph was thrown away must not leave.
            # guard: graphs that are thrown away
            self._views.setdefault(key, []).append(ref(view))
        return view

    def send(self) -> None:
        """Choose what leaves, and copy it."""
        self._is_over = True
        views, self._views = self._views, {}
        views.pop(0, None)
        alive = [[x for x in [seen() for seen in group] if x] for group in views.values()]
        may_leave = [
            (group, storage_bytes(group))
            for group in filter(None, alive)
            # guard: what has changed by now
            # guard: what somebody else holds
            if not (any(x.is_changed for x in group) or is_held(group))
        ]
        left = self._share * sum(size for _, size in may_leave)
        storages = []
        # The tensors that were saved first leave, up to the share, since backward needs them last.
        for group, size in may_leave:
            if size <= left:
                left -= size
                storages.append(sent(group, self._memory))
        if storages:
            # guard: out after the layers
            wait_for(self._memory.out, _event(self.stream))
            self._copy("out", self._memory.out, storages, Storage.to_host)

    def let_go(self) -> None:
        """Have the compute stream wait for what leaves, and let go of the memory."""
        if self._storages and not self._wanted:
            self._arrive()
            self._has_left = True
            for storage in self._storages:
                storage.here = None

    def fetch(self) -> None:
        """Bring back what has left."""
        self._wanted = True
        if not self._has_left:
            return
        self._has_left = False
        back, device = self._memory.back, get_device(self.stream)
        with use_stream(self.stream):
            for storage in self._storages:
                storage.make_room(device)
        # The copies back wait for the compute stream. On it are earlier uses of the new memory, the
        # filling of new memory in deterministic mode, and the wait for the copies out.
        # guard: back after compute
        wait_for(back, _event(self.stream))
        self._copy("back", back, self._storages, Storage.to_device)

    def _copy(
        self,
        way: str,
        lane: AbstractStream,
        storages: list[Storage],
        copy: Callable[[Storage], None],
    ) -> None:
        recorder = self._recorder
        with use_stream(lane), labels.within(labels.of(way, *self._way)):
            if recorder is not None:
                mark = recorder.begin(Mark(way, lane, 0, *self._way))
            for storage in storages:
                copy(storage)
            if recorder is not None:
                recorder.end(mark)
                recorder.host[str(lane.device)] = sum(self._memory.sizes)
        self._copied = _event(lane)
        for storage in storages:
            storage.event = self._copied
        self._storages = storages

    def _arrive(self) -> None:
        """Have the compute stream wait for the copies."""
        assert self._copied is not None
        # guard: compute after copies
        wait_for(self.stream, self._copied)
        for storage in self._storages:
            storage.lane = None

    def begin(self) -> None:
        """Take note that backward has come to this cell: bring it back, and the one before it."""
        self._begun = True
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        if self._storages:
            self._arrive()
            # From here on only views hold a storage. Backward frees it together with its last view.
            self._storages = []

    @uncompiled
    def _unpack(self, view: View) -> Tensor:
        # If a layer calls backward in its forward, nothing has left yet, and nothing is fetched.
        if self._is_over and not self._begun:
            self.begin()
        x = view.kept
        if x is None:
            x = view.rebuild(get_device(self.stream))
        if x._version != view.version:
            raise modified(x, view.version, view.layer)
        return x


def _event(stream: AbstractStream) -> Event:
    event = record(stream)
    assert event is not None
    return event
