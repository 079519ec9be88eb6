"""Long runs, runs in several threads, and checks that nothing of them stays behind."""

import gc
import os
import threading
import time
from contextlib import contextmanager

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.helpers import CPUS, MODES, run_pipeline
from tests.support.size import some
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.workers import Workers
from torchgpipe.partition.split import split_module

#: How many steps a long run takes.
STEPS = some(1000, 60)

#: After so many steps a run has all that it will ever have.
WARM = 10

ROWS, WIDTH, CHUNKS = 12, 4096, 3

#: By how many bytes a process may grow that keeps nothing, since allocators do not give all back:
#: three quarters of what it would if in each step one output of a layer was kept.
SLACK = STEPS * (ROWS // CHUNKS * WIDTH * 4) * 3 // 4


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
        stop = {"always": self.chunks, "except_last": self.chunks - 1, "never": 0}[self.checkpoint]
        return run_pipeline(
            list(self.partitions),
            self.devices,
            input,
            chunks=self.chunks,
            checkpointed=stop if self.training and torch.is_grad_enabled() else 0,
            workers=self.workers,
        )

    def __getitem__(self, index):
        return [layer for layers in self.partitions for layer in layers][index]


#: How cells are issued on the CPU: by the caller, as all devices are one; or each partition's by
#: its worker.
WAYS = {"caller": GPipe, "workers": Piped}


class Error(Exception):
    """An exception of a layer that was told to fail."""


class Layer(nn.Module):
    """A layer that saves its output and its weight, and fails where it is told to.

    Args:
        refs: gets a weak reference to the memory of each output.
    """

    def __init__(self, refs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.refs = refs
        #: When to fail: in "forward", in "recomputation", in "backward", or never.
        self.fails = None
        #: In which of its runs of that kind.
        self.countdown = 0

    def forward(self, x):
        self.fail("recomputation" if is_recomputing() else "forward")
        y = (x * self.weight).tanh()
        self.refs.append(StorageWeakRef(y.untyped_storage()))
        return Failing.apply(y, self)

    def fail(self, when):
        if when == self.fails:
            self.countdown -= 1
            if self.countdown < 0:
                self.fails = None
                raise Error(when)


class Failing(torch.autograd.Function):
    """A function that passes its input on, and fails in backward if the layer is told to."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.fail("backward")
        return grad + ctx.saved_tensors[0] * 0, None


#: Where steps fail: when, in which of three layers, and in which of three micro-batches.
FAILURES = {
    "forward of the first cell": ("forward", 0, 0),
    "forward of a cell between": ("forward", 1, 1),
    "forward of the last cell": ("forward", 2, 2),
    "first recomputation": ("recomputation", 2, 0),
    "a later recomputation": ("recomputation", 1, 1),
    "first backward": ("backward", 2, 0),
    "a later backward": ("backward", 1, 1),
    "last backward": ("backward", 0, 2),
}


#: Where, and with what checkpointing.
CASES = [
    (failure, mode)
    for failure, (when, _, _) in FAILURES.items()
    for mode in MODES
    if mode != "never" or when != "recomputation"
]


class Training:
    """Steps of a small model, some of which fail.

    Args:
        wrap: a function that wraps layers, given layers, balance and options.
        devices: the devices of the model, if not the CPU.
    """

    def __init__(self, wrap, devices=("cpu",) * 3):
        #: To the memory of all outputs of layers in the last step.
        self.refs = []
        layers = nn.Sequential(*[Layer(self.refs) for _ in range(3)])
        self.model = wrap(layers, [1, 1, 1], devices=devices, chunks=CHUNKS)
        self.device = devices[0]

    def step(self, k, mode=None):
        """Take the k-th step, in another checkpoint mode than the one before."""
        self.model.checkpoint = mode or MODES[k % len(MODES)]
        self.refs.clear()
        self.model.zero_grad()
        # Anew in each step, and required: the graph goes on beyond the model.
        input = torch.rand(ROWS, WIDTH, device=self.device, requires_grad=True)
        loss = self.model(input * 1).sum()
        # Some steps run without gradients.
        if mode or k % 4:
            loss.backward()

    def failing_step(self, k):
        """Take the k-th step, which fails where the k-th case says."""
        failure, mode = CASES[k % len(CASES)]
        when, j, countdown = FAILURES[failure]
        self.model[j].fails, self.model[j].countdown = when, countdown
        try:
            self.step(k, mode)
        except Error:
            pass
        else:
            raise AssertionError(f"did not fail: {failure}, {mode}")
        self.model.zero_grad()

    @property
    def alive(self):
        """Number of outputs of layers in the last step that are alive."""
        return sum(not ref.expired() for ref in self.refs)


def held(allocated):
    """Numbers of things that the process holds, without memory that belongs to no tensor.

    Args:
        allocated: gives the memory of the devices in bytes.
    """
    return {
        # Not isinstance(), at which some objects of torch warn.
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        "threads": len(threading.enumerate()),
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
        # Threads that end, and those of autograd that another one has failed, take a while.
        eventually(lambda: not exceeding(held(allocated), before))
        more, growth = exceeding(held(allocated), before), resident() - memory
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
