"""Long runs, runs in several threads, and checks that nothing of them stays behind."""

import gc
import os
import threading
import time
from contextlib import contextmanager

import torch
from torch import nn

from tests.support.helpers import CPUS, run_pipeline
from tests.support.size import some
from torchgpipe import GPipe
from torchgpipe.engine.workers import Workers
from torchgpipe.partition.split import split_module

#: How many steps a long run takes.
STEPS = some(1000, 15)

#: After so many steps a run has all that it will ever have.
WARM = 10

#: By how many bytes a process may grow that keeps nothing, since allocators do not give all back.
SLACK = STEPS * 48 * 1024


class Piped(nn.Module):
    """A wrapper on the CPU, each of whose partitions has a worker of its own."""

    def __init__(self, module, balance, *, chunks=1, checkpoint="except_last", devices=()):
        super().__init__()
        self.partitions = nn.ModuleList(split_module(module, balance))
        self.devices, self.chunks, self.checkpoint = CPUS[: len(balance)], chunks, checkpoint
        self.workers, self.process = Workers(self.devices), os.getpid()

    def forward(self, input):
        if self.process != os.getpid():
            self.workers, self.process = Workers(self.devices), os.getpid()
        return run_pipeline(
            list(self.partitions),
            self.devices,
            input,
            chunks=self.chunks,
            mode=self.checkpoint if self.training and torch.is_grad_enabled() else "never",
            workers=self.workers,
        )

    def __getitem__(self, index):
        return [layer for layers in self.partitions for layer in layers][index]


#: How cells are issued on the CPU: by the caller, as all devices are one; or each partition's by
#: its worker.
WAYS = {"caller": GPipe, "workers": Piped}


def held(allocated):
    """Numbers of things that the process holds, without memory that belongs to no tensor.

    Args:
        allocated: gives the memory of the devices in bytes.
    """
    return {
        # Not isinstance(), at which some objects of torch warn.
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        # Python knows a thread of autograd, a dummy, from when it first asks for its own name.
        "threads": sum(not x.name.startswith("Dummy") for x in threading.enumerate()),
        "tasks": listed("task"),
        "files": listed("fd"),
        "allocated": allocated(),
    }


def listed(name):
    """Entries in a folder of this process, such as threads, if the system tells."""
    path = f"/proc/self/{name}"
    # The last one of the files is that of this list itself.
    return len(os.listdir(path)) if os.path.isdir(path) else 0


def resident():
    """Bytes of memory of this process, if the system tells."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def uncollected():
    """Switch the garbage collector off within a ``with`` block, so that cycles stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def verify_nothing_stays(step, warm_up=None, allocated=lambda: 0):
    """Check that a long run holds at its end what it held after few steps.

    Args:
        step: a function that takes a step, given the number of the step.
        warm_up: a function that takes the first steps instead.
        allocated: gives the memory of the devices in bytes.
    """
    with uncollected():
        for k in range(WARM):
            (warm_up or step)(k)
        before, memory = held(allocated), resident()
        for k in range(STEPS):
            if k == WARM:
                memory = resident()
            step(k)
        # Counting takes memory, too.
        growth = resident() - memory
        # Threads that end, and those of autograd that another one has failed, take a while.
        eventually(lambda: not exceeding(held(allocated), before))
        more = exceeding(held(allocated), before)
    assert not more, f"before and after {STEPS} steps: {more}"
    assert growth <= SLACK, f"{growth / STEPS} bytes in each step"


def exceeding(after, before):
    """List the numbers that have grown."""
    return {name: (before[name], after[name]) for name in before if after[name] > before[name]}


def eventually(is_so, seconds=5):
    """Whether a condition becomes true within a generous time."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def run_in_threads(functions, seconds=60):
    """Run functions at once, each in a thread; raise the first of their errors."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]
