"""After an error anywhere in a step, all settings are as before, and the next step is right.

The error comes in the k-th operator of a step, for every k: in forward, recomputation, backward,
the loss, or a hook.
"""

import faulthandler
import threading
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES
from tests.support.size import some
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.ambient import thread
from torchgpipe.ambient.context import Modes, autocast_nesting, current_hooks
from torchgpipe.ambient.random_numbers import get_state
from torchgpipe.engine import workers

WIDTH, STAGES, CHUNKS = 3, 4, 4
CPUS = [torch.device("cpu")] * STAGES
#: The seconds after which a step is said to hang: all threads are printed, and the process ends.
PATIENCE = 60


class PlannedError(Exception):
    """The error."""


class Countdown:
    """A number of operators, of which the last one raises."""

    def __init__(self):
        self.lock, self.left, self.count = threading.Lock(), None, 0

    def __call__(self):
        with self.lock:
            self.count += 1
            if self.left is None:
                return
            self.left -= 1
            if self.left != 0:
                return
        raise PlannedError


countdown = Countdown()


@torch.library.custom_op("torchgpipe_tests::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    countdown()
    return x.clone()


count.register_fake(torch.empty_like)
count.register_autograd(lambda _, grad: count(grad))


class Layer(nn.Module):
    """A layer of which forward, recomputation and backward count."""

    def __init__(self, draws):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2 if draws else 0.0)

    def forward(self, x):
        return count(self.dropout(self.linear(x).sin()))


class Hooked(Layer):
    """A layer whose hook counts, too."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: countdown())
        return y


def loss(x, y):
    return count(x.float()).sub(y).square().mean()


def driver(name, mode, layers, devices):
    kind, *options = name.split()
    if kind == "MappedGPipe":
        device_map = {str(j): device for j, device in enumerate(devices)}
        threads = len(options) + 1
        return MappedGPipe(layers, device_map, chunks=CHUNKS, checkpoint=mode, threads=threads)
    model = GPipe(layers, [1] * STAGES, devices=devices, chunks=CHUNKS, checkpoint=mode)
    return ScheduledLoss(model, loss, kind, stages=options[0]) if options else model


def step(training, autocast, devices):
    """A step; what it has computed, and where it has left the generators."""
    torch.manual_seed(1)
    x, y = torch.rand(2, 2 * CHUNKS, WIDTH)
    x, y = x.to(devices[0]), y.to(devices[-1])
    training.zero_grad()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            scheduled = isinstance(training, ScheduledLoss)
            value = training(x, y) if scheduled else loss(training(x), y)
        value.backward()
    finally:
        faulthandler.cancel_dump_traceback_later()
    grads = [p.grad.cpu() for p in training.parameters()]
    return [value.detach().cpu(), *grads, *[get_state(device) for device in devices]]


def settings():
    """The settings of this thread, of a new one, and of each worker that runs."""
    found = {threading.current_thread(): of_thread()}
    new = SimpleQueue()
    beside = threading.Thread(target=lambda: new.put(of_thread()))
    beside.start()
    beside.join()
    found["new"] = new.get()
    for worker, submit in dict(workers._threads).items():
        if worker.is_alive():
            answers = SimpleQueue()
            submit(lambda answers=answers: answers.put(of_thread()))
            found[worker] = answers.get(timeout=PATIENCE)
    return found


def of_thread():
    values = []
    for local, own in zip(thread._registered, thread.saved()):
        # A new thread has the defaults of the class.
        names = [name for name in vars(type(local)) if not name.startswith("_")] + [*own]
        # The layer that has run last has no effect.
        values.append({name: getattr(local, name) for name in names if name != "kind"})
    # Nor has the number of threads of an operator, which each worker takes from its caller anew.
    return Modes.current()._replace(threads=0), autocast_nesting(), current_hooks(), values


NAMES = ["GPipe", "MappedGPipe"]
NAMES += [
    f"{schedule} {stages}"
    for schedule in ("1f1b", "zero_bubble_h1", "dualpipe_v", "interleaved")
    for stages in ("eager", "graph")
]


def training_of(name, mode, draws, devices):
    torch.manual_seed(0)
    kind = Layer if name.endswith("graph") else Hooked
    layers = [kind(draws).to(device) for device in devices]
    return driver(name, mode, nn.Sequential(*layers), devices)


def fail(training, k, autocast, devices):
    """Have the k-th operator of a step raise, and check what is set afterwards."""
    before = settings()
    countdown.left = k
    try:
        with pytest.raises(PlannedError):
            step(training, autocast, devices)
    finally:
        countdown.left = None
    for worker, values in settings().items():
        # Workers of this step are as a new thread is.
        assert values == before.get(worker, before["new"])


def fail_anywhere(training, autocast, devices, first, stride):
    """Have one operator after another raise, each in a step of its own before one that is right."""
    # Layers run, then are traced; and the third step may know that they draw nothing.
    for _ in range(3):
        expected = step(training, autocast, devices)
    countdown.count = 0
    step(training, autocast, devices)
    operators = countdown.count
    stride = some(1, stride(operators))
    for k in range(1 + first % stride, operators + 1, stride):
        fail(training, k, autocast, devices)
        assert all(map(torch.equal, step(training, autocast, devices), expected))


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_errors_anywhere(name, mode, draws):
    number = NAMES.index(name), MODES.index(mode)
    training = training_of(name, mode, draws, CPUS)
    autocast = (sum(number) + draws) % 2 == 1
    fail_anywhere(training, autocast, CPUS, 3 * number[0] + number[1], lambda count: count // 2)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("k", some([*range(1, 40, 3)], [17]))
@pytest.mark.parametrize("name", NAMES)
def test_errors_before_anything_is_known(name, k, number):
    training, whole = (training_of(name, "always", True, CPUS) for _ in range(2))
    expected = [step(whole, True, CPUS) for _ in range(3)]
    for _ in range(number):
        step(training, True, CPUS)
    fail(training, k, True, CPUS)
    for values in expected:
        assert all(map(torch.equal, step(training, True, CPUS), values))
