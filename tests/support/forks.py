"""Forked processes that call a function, and functions to call there."""

import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager, suppress

import torch
from torch import nn

from torchgpipe import is_recomputing

#: In how many seconds a child is taken to hang.
HANGS = 10

WIDTH = 4


class ChildError(Exception):
    """An exception of a child: the name of its type, its message, and its traceback."""


def in_child(function):
    """Call a function in a forked child, and return its result.

    Raises:
        ChildError: the function raised an exception there.
        AssertionError: the child hangs, or was killed.
    """
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            _be_child(function, file)
        status = wait(child, HANGS)
        assert status is not None, "the child hangs"
        assert status == 0, f"the child ended by {status}"
        file.seek(0)
        succeeded, found = pickle.load(file)
    if not succeeded:
        raise ChildError(found)
    return found


def _be_child(function, file):
    status = 1
    with suppress(BaseException):
        try:
            found = True, function()
        except BaseException as error:
            found = False, "".join(traceback.format_exception(error))
        pickle.dump(found, file)
        file.flush()
        status = 0
    # Nothing of the parent's is ended here.
    os._exit(status)


def wait(child, seconds):
    """Exit status of a child, or None if it hangs and is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Pausing(nn.Module):
    """A layer that makes a thread pause in "forward" or in "recomputation" while others go on."""

    def __init__(self, when):
        super().__init__()
        self.when = when
        self.reached, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        if is_recomputing() == (self.when == "recomputation"):
            self.reached.set()
            assert self.go_on.wait(60)
        # A recomputation that draws holds a lock, too.
        return x + torch.rand_like(x) if self.when == "recomputation" else x

    @contextmanager
    def within_a_step_of(self, model, device="cpu"):
        """Keep another thread in the middle of a step within a ``with`` block."""
        thread = threading.Thread(target=step, args=(model, device), daemon=True)
        thread.start()
        assert self.reached.wait(60)
        try:
            yield
        finally:
            self.go_on.set()
            thread.join(60)
        assert not thread.is_alive(), "the parent hangs"


def layers(layer=None):
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer or nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def forward(model, device="cpu"):
    """Output of a model, without a graph."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [model(torch.ones(4, WIDTH, device=device)).tolist()]


def step(model, device="cpu"):
    """Output of a model, and its gradients."""
    torch.manual_seed(0)
    output = model(torch.ones(4, WIDTH, device=device))
    gradients = torch.autograd.grad(output.square().sum(), [*model.parameters()])
    return [x.tolist() for x in (output, *gradients)]
