"""Workers: a thread for each device, so that one cell does not hold up the others.

A device's work is issued by one thread at a time, since its default generator of random numbers
is one, too. A worker does not wait for the others but where it needs what they make: a cell begins
when those that it needs are done, and when the one before it on the same device is.

Accelerators compute while the host goes on, and all that it does is to issue cells, in Python.
Several threads get less of that done than one, since they take the interpreter from each other
(half as much, for layers of small kernels on four devices). But layers may hold the host up, as
those do that wait for what a device has computed, and the CPU's. So where all devices are
accelerators, both ways are tried: the caller issues the cells itself, in the order of the clock
cycles, or the workers do, whichever took less time the last time. The other one gets a chance in
every run whose number is a power of two.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch

from torchgpipe.ambient.context import Context
from torchgpipe.ambient.snapshot import Snapshot
from torchgpipe.devices.streams import has_streams

__all__: list[str] = []


#: For how many seconds the caller waits for what is running when something has failed.
PATIENCE = 0.5


class Task(NamedTuple):
    """Something to run for a device.

    Args:
        name: what others call it that need it; of several that fail, the first by name counts.
        device: whose worker runs it.
        function: what to run.
        needs: the names of tasks of other devices that must be done before.
    """

    name: Any
    device: torch.device
    function: Callable[[], None]
    needs: Sequence[Any] = ()


#: Of all workers, the threads and what is submitted to them.
_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[None], None]]
_threads = weakref.WeakKeyDictionary()


class Worker:
    """A thread that runs functions in the order they were submitted, while it is referred to.

    Its thread is a daemon that holds no reference to the worker: it ends with the worker or
    with the process, and keeps neither alive.
    """

    def __init__(self, name: str) -> None:
        functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.submit = functions.put
        thread = threading.Thread(target=_serve, args=(functions,), name=name, daemon=True)
        thread.start()
        _threads[thread] = functions.put
        weakref.finalize(self, functions.put, None)


def _serve(functions: SimpleQueue[Callable[[], None] | None]) -> None:
    # Never the outermost in autocast: weights that were cast are the caller's to forget.
    torch.autocast_increment_nesting()
    while (function := functions.get()) is not None:
        function()
        del function


@atexit.register
def _end_threads() -> None:
    """Has no worker be within an operator when Python ends, since that would abort the process.

    In a task that still runs SystemExit is raised, when it comes to Python.
    """
    threads = dict(_threads)
    for submit in threads.values():
        submit(None)
    until = monotonic() + PATIENCE
    for thread in threads:
        thread.join(0.01)
        if thread.ident is not None and thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
    for thread in threads:
        thread.join(max(0, until - monotonic()))


class Run:
    """One run of some tasks by the workers of several devices.

    Args:
        tasks: each behind those that it needs.
        context: the modes of the caller, which the tasks see.
    """

    def __init__(self, tasks: Sequence[Task], context: Context) -> None:
        self.context = context
        self.tasks: dict[torch.device, list[Task]] = {}
        for task in tasks:
            self.tasks.setdefault(task.device, []).append(task)
        #: Each is locked until its task is done, or will never be.
        self.gates = {name: _locked() for task in tasks for name in task.needs}
        #: The devices none of whose tasks is running, or will be.
        self.ended: SimpleQueue[torch.device] = SimpleQueue()
        self.errors: dict[Any, BaseException] = {}
        self.stopped = False

    def work(self, device: torch.device) -> None:
        """Runs the tasks of a device, unless the run was abandoned."""
        left = self.tasks.pop(device, None)
        if left is None:
            return
        left.reverse()
        try:
            self.context.lend_threads()
            with self.context.entered(Snapshot([device])):
                while left:
                    for name in left[-1].needs:
                        with self.gates[name]:
                            pass
                    if self.stopped:
                        break
                    left[-1].function()
                    self._open(left.pop())
        except BaseException as error:
            self.errors[left[-1].name] = error
            self.stopped = True
        finally:
            self._leave(device, left)
            # The error refers to this frame.
            del self, left

    def abandon(self) -> None:
        """Has no further task start."""
        self.stopped = True
        for device in [*self.tasks]:
            # Its worker may begin at the same time.
            left = self.tasks.pop(device, None)
            if left is not None:
                self._leave(device, left)

    def _leave(self, device: torch.device, left: list[Task]) -> None:
        # Whoever waits for these sees that the run has stopped.
        for task in left:
            self._open(task)
        # The caller goes on, and counts on what they refer to being free.
        left.clear()
        self.ended.put(device)

    def _open(self, task: Task) -> None:
        gate = self.gates.get(task.name)
        if gate is not None:
            gate.release()


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _run_in_order(tasks: Iterable[Task]) -> None:
    for task in tasks:
        task.function()


class Workers:
    """A worker per distinct device, started when first needed; the caller where that will do.

    Args:
        devices: the devices, in any order; each may come several times.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = set(devices)
        self._runs = 0
        #: The seconds that a task took the last time, by the caller and by the workers.
        self._seconds = {"caller": 0.0, "workers": math.inf}
        self._workers: dict[torch.device, Worker] = {}

    def run(self, tasks: Sequence[Task], context: Context) -> None:
        """Runs tasks, and returns when all are done.

        Those of one device are run in order, each behind those that it needs.

        Args:
            tasks: what to run, each behind those that it needs.
            context: the modes of the caller, which the tasks see.

        Raises:
            BaseException: what a task raised, the same object; of several, that of the first by
                name. By then the tasks that were running have ended, if it did not take them
                longer than :data:`PATIENCE`, and no other starts.
        """
        # guard: modes that only the caller computes in
        if context.alone or len(self._devices) < 2:
            _run_in_order(tasks)
            return
        way = self._way()
        start = perf_counter()
        if way == "caller":
            _run_in_order(tasks)
        else:
            self._have_run(tasks, context)
        self._seconds[way] = (perf_counter() - start) / len(tasks)

    def _way(self) -> str:
        if not all(map(has_streams, self._devices)):
            return "workers"
        self._runs += 1
        faster, slower = sorted(self._seconds, key=lambda way: self._seconds[way])
        # The first run of a program takes longer, as kernels are loaded and memory is allocated.
        is_power_of_two = self._runs & (self._runs - 1) == 0
        return slower if is_power_of_two and self._runs > 1 else faster

    def _have_run(self, tasks: Sequence[Task], context: Context) -> None:
        run = Run(tasks, context)
        working = {*run.tasks}
        try:
            for device in working:
                self._worker(device).submit(partial(run.work, device))
            while working and not run.stopped:
                # In pieces: Ctrl-C that came just before is not heard until get() returns.
                with suppress(Empty):
                    working.remove(run.ended.get(timeout=0.1))
        finally:
            # Where the caller was interrupted, wherever that was.
            run.abandon()
            until = monotonic() + PATIENCE
            with suppress(Empty):
                while working:
                    working.remove(run.ended.get(timeout=max(0, until - monotonic())))
            errors, run.errors = run.errors, {}
            # These refer to this frame.
            del run
        try:
            if errors:
                raise errors[min(errors)]
        finally:
            del errors

    def _worker(self, device: torch.device) -> Worker:
        if device not in self._workers:
            self._workers[device] = Worker(f"torchgpipe-{device}")
        return self._workers[device]
