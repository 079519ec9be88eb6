"""Workers: which thread issues a cell, the caller's or one of the device's own.

One thread at a time issues the work of a device, since a device's default generator of random
numbers is one, too. A cell begins when the cells that it needs are done, and the one before it on
the same device. Nothing else is waited for.

Accelerators compute while the host goes on, and issuing cells is all that the host does, in Python.
Several threads issue less than one, since they take the interpreter from each other (half as much,
for layers of small kernels on four devices). So where all devices are accelerators, the caller
issues all cells itself, in the order of the clock cycles. But layers may block the host, as those
do that wait for what a device has computed. When a cell was seen to block, the workers are tried in
the next step, and from then on the faster one of the two, by its last step, issues the cells. The
other one is tried again in every step whose number is a power of two. On the CPU every cell blocks,
so there the workers issue.

Cells count as blocking if the caller's thread slept for most of a step. A driver that keeps the
processor busy while it waits looks like work, and the caller goes on issuing.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, thread_time
from typing import Any, NamedTuple, TypeAlias

import torch

from torchgpipe.ambient.context import Context, SavedSettings
from torchgpipe.devices.streams import has_streams

__all__: list[str] = []

try:
    import resource
except ImportError:
    # Windows has no such module.
    resource = None  # type: ignore[assignment]

#: The argument with which getrusage() counts for one thread; None on systems without, as macOS.
RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)

logger = logging.getLogger(__name__)

#: The least sleep of the caller in a step, in seconds, for Workers to find that cells block it.
ASLEEP = 0.001

#: The most seconds that :meth:`Workers.run` waits for running tasks when one has failed, and that
#: Python, when it ends, waits for the threads of workers.
PATIENCE = 0.5


#: A worker: its device, and its index among the workers of the device.
Key: TypeAlias = tuple[torch.device, int]


class Task(NamedTuple):
    """Something to run for a device.

    Args:
        name: the name by which other tasks need it. Of several tasks that fail, the error of the
            first by name is raised.
        device: the device whose worker runs it.
        function: the function to run.
        needs: the names of tasks of other workers that must be done before.
        line: which of several workers of the device runs it; by default a device has one.
    """

    name: Any
    device: torch.device
    function: Callable[[], None]
    needs: Sequence[Any] = ()
    line: int = 0

    @property
    def worker(self) -> Key:
        """The worker that runs the task."""
        return self.device, self.line


#: For each worker's thread, the function that submits work to it, or None to end the thread.
_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[None], None]]
_threads = weakref.WeakKeyDictionary()


class Worker:
    """A thread that runs functions in the order they were submitted, while it is referred to.

    The thread is a daemon that holds no reference to the worker. So it ends with the worker or
    with the process, and keeps neither alive.
    """

    def __init__(self, name: str) -> None:
        functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.submit = functions.put
        self.thread = thread = threading.Thread(
            target=_serve, args=(functions,), name=name, daemon=True
        )
        thread.start()
        _threads[thread] = functions.put
        weakref.finalize(self, functions.put, None)


def _serve(functions: SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := functions.get()) is not None:
        function()
        del function


@atexit.register
def _end_threads() -> None:
    """End all workers before Python ends: a thread within an operator would abort the process.

    A task that still runs is ended by SystemExit, as soon as it is back in Python.
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


class Round:
    """Some tasks that several workers run."""

    def __init__(self, tasks: Sequence[Task], context: Context) -> None:
        self.context = context
        self.tasks: dict[Key, list[Task]] = {}
        for task in tasks:
            self.tasks.setdefault(task.worker, []).append(task)
        #: For the name of each task that other tasks need, a lock, held until the task is done or
        #: will never be run: workers wait for it.
        self.gates = {name: threading.Lock() for task in tasks for name in task.needs}
        for gate in self.gates.values():
            gate.acquire()
        #: The workers that will run no more tasks of this round; the caller waits for all of them.
        self.ended: SimpleQueue[Key] = SimpleQueue()
        self.errors: dict[Any, BaseException] = {}
        self.stopped = False

    def work(self, worker: Key) -> None:
        """Run the tasks of a worker, unless the round was abandoned."""
        remaining = self.tasks.pop(worker, None)
        if remaining is None:
            return
        remaining.reverse()
        nested = self.context.nested
        # A thread that leaves its outermost autocast block clears the cache of cast weights, which
        # all threads share. A caller within autocast still needs the cache. Then this thread counts
        # itself as within autocast, too, so no block of a layer is its outermost one.
        if nested:
            # guard: casts of the caller's block
            torch.autocast_increment_nesting()
        try:
            self.context.use_callers_threads()
            with self.context.entered(SavedSettings([worker[0]])):
                while remaining:
                    for name in remaining[-1].needs:
                        with self.gates[name]:
                            pass
                    if self.stopped:
                        break
                    remaining[-1].function()
                    self._open(remaining.pop())
        except BaseException as error:
            self.errors[remaining[-1].name] = error
            self.stopped = True
        finally:
            if nested:
                torch.autocast_decrement_nesting()
            if self.stopped:
                # The caller may have left its autocast block, which clears the cache, before layers
                # in this thread cast weights again. Later steps would use these outdated casts.
                # guard: casts after a failure
                torch.clear_autocast_cache()
            self._end(worker, remaining)
            # An error refers to this frame, which must not keep the tensors of tasks in memory.
            del self, remaining

    def abandon(self) -> None:
        """Make no further task start."""
        self.stopped = True
        for worker in [*self.tasks]:
            # By pop(), since the worker's thread may take these tasks at the same time.
            remaining = self.tasks.pop(worker, None)
            if remaining is not None:
                self._end(worker, remaining)

    def _end(self, worker: Key, remaining: list[Task]) -> None:
        # Workers that wait for these tasks go on, and see that the round has stopped.
        for task in remaining:
            self._open(task)
        # The caller may go on from here, and tasks must not keep their tensors in memory.
        remaining.clear()
        self.ended.put(worker)

    def _open(self, task: Task) -> None:
        gate = self.gates.get(task.name)
        if gate is not None:
            gate.release()


class Workers:
    """A thread for each device, started when first needed; or the caller's, where that will do."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = set(devices)
        #: Whether cells were seen to block the caller; only then accelerators alone get threads.
        self.seen_to_block = False
        self._rounds = 0
        #: The mean seconds of a task in the last step run by the caller, and the last by workers.
        self._seconds = {"caller": 0.0, "workers": math.inf}
        self._workers: dict[Key, Worker] = {}

    def run(self, tasks: Sequence[Task], context: Context) -> None:
        """Run tasks, and return when all are done.

        The tasks of one worker are run in order, each after the tasks that it needs.

        Raises:
            BaseException: what a task raised, the same object; of several, that of the first by
                name. By then the tasks that were running have ended, if it did not take them
                longer than :data:`PATIENCE`, and no other starts.
        """
        single = len(self._devices) < 2 and not any(task.line for task in tasks)
        # guard: modes that only the caller computes in
        if context.alone or single:
            for task in tasks:
                task.function()
            return
        way = self._way()
        start = perf_counter()
        if way == "caller":
            self._run_here(tasks)
        else:
            self.run_in_threads(tasks, context)
        self._seconds[way] = (perf_counter() - start) / len(tasks)

    def _way(self) -> str:
        if not all(map(has_streams, self._devices)):
            return "workers"
        # guard: workers only for what blocks
        if not self.seen_to_block:
            return "caller"
        self._rounds += 1
        faster, slower = sorted(self._seconds, key=lambda way: self._seconds[way])
        # The slower way is tried again in each step whose number is a power of two, as 1 and 2 are.
        # So workers that were slow in step 1, because it started threads, have another try at once.
        is_power_of_two = self._rounds & (self._rounds - 1) == 0
        return slower if is_power_of_two else faster

    def _run_here(self, tasks: Sequence[Task]) -> None:
        before, start, worked = _switches(), perf_counter(), thread_time()
        for task in tasks:
            task.function()
        took = perf_counter() - start
        asleep = took - (thread_time() - worked)
        if self.seen_to_block or asleep < max(ASLEEP, took / 2):
            return
        # A thread that the system has interrupted slept, too, but its cells did not block it.
        blocked, interrupted = (after - x for x, after in zip(before, _switches()))
        if blocked >= interrupted:
            self.seen_to_block = True
            logger.debug(
                "cells blocked the host for %.1f of %.1f ms of a step, so threads are tried",
                *(1000 * asleep, 1000 * took),
            )

    def run_in_threads(self, tasks: Sequence[Task], context: Context) -> None:
        """:meth:`run`, always by threads."""
        round = Round(tasks, context)
        working = {*round.tasks}
        try:
            for key in working:
                self._worker(key).submit(partial(round.work, key))
            while working and not round.stopped:
                # A Ctrl-C just before get() has no effect until get() returns, so it has a timeout.
                with suppress(Empty):
                    working.remove(round.ended.get(timeout=0.1))
        finally:
            # After a Ctrl-C, too, which may have come anywhere above, no further task may start.
            round.abandon()
            until = monotonic() + PATIENCE
            with suppress(Empty):
                while working:
                    working.remove(round.ended.get(timeout=max(0, until - monotonic())))
            errors, round.errors = round.errors, {}
            # The errors refer to this frame: a cycle would keep their tensors in memory.
            del round
        try:
            if errors:
                raise errors[min(errors)]
        finally:
            del errors

    def _worker(self, key: Key) -> Worker:
        if key not in self._workers:
            device, line = key
            self._workers[key] = Worker(f"torchgpipe-{device}" + (f"-{line}" if line else ""))
        return self._workers[key]


def _switches() -> tuple[int, int]:
    """Count how often this thread gave the processor up by itself, and was interrupted."""
    if RUSAGE_THREAD is None:
        return 0, 0
    usage = resource.getrusage(RUSAGE_THREAD)
    return usage.ru_nvcsw, usage.ru_nivcsw
