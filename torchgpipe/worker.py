"""Workers: a thread for each device, so that its cells are issued while others are.

A device's work is issued by one thread at a time, since its default generator of random numbers
is one, too. Where all partitions sit on one device, there is nothing to issue beside anything
else, and the caller itself does it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from queue import SimpleQueue

import torch

from torchgpipe.context import Context

__all__: list[str] = []

Task = Callable[[], None]


class Worker:
    """A thread that runs tasks in the order they were submitted, while it is referred to.

    Its thread is a daemon that holds no reference to the worker: it ends with the worker or
    with the process, and keeps neither alive.
    """

    def __init__(self, name: str) -> None:
        tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._submit = tasks.put
        threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True).start()
        weakref.finalize(self, tasks.put, None)

    def submit(self, task: Task, future: Future[None]) -> None:
        """Runs a task on the worker's thread, unless its future was cancelled by then."""
        self._submit(partial(_run, task, future))


def _serve(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task


def _run(task: Task, future: Future[None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        task()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    finally:
        # The error refers to this frame, and the future to the error.
        del task, future


class Workers:
    """A worker per distinct device, started when first needed; the caller if there is only one.

    Args:
        devices: the devices, in any order; each may come several times.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = set(devices)
        self._workers: dict[torch.device, Worker] = {}
        self._process = os.getpid()

    def run(self, tasks: Sequence[tuple[torch.device, Task]], context: Context) -> None:
        """Runs tasks, each on the worker of its device, and returns when all are done.

        Args:
            tasks: what to run, and for which device; at least one.
            context: the modes of the caller, which the tasks see.

        Raises:
            BaseException: what a task raised, the same object; of several, that of the last
                task. By then the tasks that were running have ended, and no other starts.
        """
        if len(self._devices) < 2:
            for _, task in tasks:
                task()
            return

        futures: list[Future[None]] = [Future() for _ in tasks]
        try:
            for future, (device, task) in zip(futures, tasks):
                self._worker(device).submit(partial(_within, context, task), future)
            wait(futures, return_when=FIRST_EXCEPTION)
            wait([future for future in futures if not future.cancel()])
            for future in reversed(futures):
                # Not result(), which takes an exception that is false for none.
                if not future.cancelled() and (error := future.exception()) is not None:
                    raise error
        finally:
            # Also where the caller was interrupted, wherever that was.
            for future in futures:
                future.cancel()
            # The error refers to this frame, and the futures to the error.
            del future, futures
            error = None

    def _worker(self, device: torch.device) -> Worker:
        if self._process != os.getpid():
            # Threads do not survive a fork.
            self._workers = {}
            self._process = os.getpid()
        if device not in self._workers:
            self._workers[device] = Worker(f"torchgpipe-{device}")
        return self._workers[device]


def _within(context: Context, task: Task) -> None:
    with context.entered():
        task()
