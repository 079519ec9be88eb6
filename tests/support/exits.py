"""Programs that end while there are wrappers, or in the middle of one of their steps.

``python -m tests.support.exits NAME...`` runs each program in a process of its own and prints how
it ended. The processes are forked from one that has imported torch, which takes long.
"""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.support.forks import wait
from tests.support.long_runs import Piped
from tests.support.size import SOAK
from torchgpipe import GPipe, testing

#: In how many seconds a process that ends is taken to hang. What it is amid takes far longer.
HANGS, FOREVER = 15, 300


class Endless(nn.Module):
    """A layer that calls a function again and again."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.started = threading.Event()

    def forward(self, x):
        end = time.monotonic() + FOREVER
        while time.monotonic() < end:
            self.function(x)
            self.started.set()
        return x


def sleep(x):
    time.sleep(FOREVER)


def compute(x):
    """Compute in PyTorch for long, and come to Python now and then."""
    matrix = torch.ones(256, 256, device=x.device)
    for _ in range(10):
        matrix @ matrix


def place(where):
    """Devices of a kind, and a function that wraps layers there with workers."""
    if where == "cpu":
        return ["cpu"] * 2, Piped
    # Beside the CPU an accelerator's cells are always issued by workers.
    return [testing.load(2)[0], "cpu"], GPipe


def step(model, device):
    model(torch.ones(4, 2, device=device)).sum().backward()


def live(where):
    """Make several wrappers, whose workers have all started."""
    devices, wrap = place(where)
    # The wrappers are freed at the very end, with the module.
    global wrappers
    wrappers = [
        wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2, devices=devices)
        for _ in range(10)
    ]
    for model in wrappers:
        step(model, devices[0])
    assert threading.active_count() == 21
    print("end")


def amid(end, function, where):
    """End the main thread in the middle of a cell.

    Args:
        end: "interrupted" by Ctrl-C in its step, or "left" to another thread by an exit.
        function: called by the cell, in the middle of which the thread ends.
        where: the kind of device.
    """
    devices, wrap = place(where)
    endless = Endless(function)
    model = wrap(nn.Sequential(nn.Linear(2, 2), endless), [1, 1], chunks=2, devices=devices)
    if function is sleep:
        endless.function = lambda x: (endless.started.set(), sleep(x))

    def interrupt():
        endless.started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    own = partial(step, model, devices[0])
    others = interrupt if end == "interrupted" else own
    # Also where the tests run in the background, and Ctrl-C would be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=others, daemon=True).start()
    if end == "interrupted":
        own()
    endless.started.wait()
    sys.exit(3)


def computed():
    """Compute on virtual accelerators, and keep their tensors to the very end."""
    devices = testing.load(4)
    layers = [nn.Linear(4, 4).to(device) for device in devices]
    streams = [torch.Stream(device) for device in devices]
    events = [stream.record_event() for stream in streams]
    x = torch.randn(3, 4)
    for layer, device, stream in zip(layers, devices, streams):
        x = x.to(device)
        with stream:
            x = layer(x)
    x.sum().backward()
    global kept
    kept = [layers, streams, events, x]
    kept += [torch.zeros(4, pin_memory=True), torch.Generator(devices[1])]
    return devices


def fail():
    computed()
    raise KeyError("mine")


def fork():
    """Fork a child that computes without backward, and end both."""
    devices = computed()
    child = os.fork()
    if child == 0:
        os._exit(int((torch.ones(3, device=devices[2]) * 2).sum().item()))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 6)


def refused():
    """Be refused a dry run, for which there are too few addresses, and compute for real."""
    device = testing.load(4)[0]
    resource.setrlimit(resource.RLIMIT_AS, (2**44, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        testing.dry_run(lambda devices: torch.ones(3, device=devices[0]), 4)
    except RuntimeError as error:
        print(error)
    print(torch.ones(3, device=device).sum().item())


#: By the name of each what runs in it.
PROGRAMS = {f"live, {where}": partial(live, where) for where in ("cpu", "virtual")} | {
    f"{end} amid {function.__name__}, {where}": partial(amid, end, function, where)
    for end, function, where in (
        ("interrupted", sleep, "cpu"),
        ("interrupted", compute, "cpu"),
        ("interrupted", compute, "virtual"),
        ("left", compute, "cpu"),
    )
}
PROGRAMS |= {"fail, virtual": fail, "fork, virtual": fork, "refused, virtual": refused}


def endings(names):
    """Run programs; return the exit status and the output of each, by name."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.exits", *names],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60 + HANGS * len(names),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


def main():
    """Fork a child for each program; return the program in a child, and None in the parent."""
    torch.set_num_threads(1)
    if not SOAK:
        # The garbage collector would visit all of torch once more at the end of each child.
        gc.freeze()
    ended = {}
    for name in sys.argv[1:]:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                return PROGRAMS[name]
            status = wait(child, HANGS)
            printed = [file.seek(0) or file.read() for file in (out, err)]
            ended[name] = [status, *printed]
    print(json.dumps(ended))
    return None


if __name__ == "__main__":
    program = main()
    if program is not None:
        # It is the process's main program, and ends as it does.
        program()
