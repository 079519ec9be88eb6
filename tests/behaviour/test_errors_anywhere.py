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
from torchgpipe.engine import workers

WIDTH, STAGES, CHUNKS = 3, 4, 4
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


def driver(name, mode, layers):
    if name == "MappedGPipe":
        return MappedGPipe(
            layers, {str(j): "cpu" for j in range(STAGES)}, chunks=CHUNKS, checkpoint=mode
        )
    model = GPipe(layers, [1] * STAGES, devices=["cpu"] * STAGES, chunks=CHUNKS, checkpoint=mode)
    if name == "GPipe":
        return model
    schedule, stages = name.split()
    return ScheduledLoss(model, loss, schedule, stages=stages)


def step(training, autocast):
    """A step; what it has computed, and where it has left the generator."""
    torch.manual_seed(1)
    x, y = torch.rand(2, 2 * CHUNKS, WIDTH)
    training.zero_grad()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scheduled = isinstance(training, ScheduledLoss)
            value = training(x, y) if scheduled else loss(training(x), y)
        value.backward()
    finally:
        faulthandler.cancel_dump_traceback_later()
    grads = [p.grad.clone() for p in training.parameters()]
    return [value.detach(), *grads, torch.get_rng_state()]


def settings():
    """The settings of this thread, and of each worker that runs."""
    found = {threading.current_thread(): of_thread()}
    for worker, submit in dict(workers._threads).items():
        if worker.is_alive():
            answers = SimpleQueue()
            submit(lambda answers=answers: answers.put(of_thread()))
            found[worker] = answers.get(timeout=PATIENCE)
    return found


def of_thread():
    values = thread.saved()
    for value in values:
        # The layer that has run last has no effect.
        value.pop("kind", None)
    return Modes.current(), autocast_nesting(), current_hooks(), values


NAMES = ["GPipe", "MappedGPipe"]
NAMES += [
    f"{schedule} {stages}"
    for schedule in ("1f1b", "zero_bubble_h1", "dualpipe_v", "interleaved")
    for stages in ("eager", "graph")
]


def training_of(name, mode, draws):
    torch.manual_seed(0)
    kind = Layer if name.endswith("graph") else Hooked
    return driver(name, mode, nn.Sequential(*[kind(draws) for _ in range(STAGES)]))


def fail(training, k, autocast):
    """Have the k-th operator of a step raise, and check what is set afterwards."""
    before = settings()
    countdown.left = k
    try:
        with pytest.raises(PlannedError):
            step(training, autocast)
    finally:
        countdown.left = None
    for worker, values in settings().items():
        # Workers of tests before may end meanwhile, and others of this step begin.
        assert values == before.get(worker, values)


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_errors_anywhere(name, mode, draws):
    autocast = (NAMES.index(name) + MODES.index(mode) + draws) % 2 == 1
    training = training_of(name, mode, draws)
    # Layers run, then are traced; and the third step may know that they draw nothing.
    for _ in range(3):
        expected = step(training, autocast)
    countdown.count = 0
    step(training, autocast)
    operators = countdown.count
    first = 1 + (3 * NAMES.index(name) + MODES.index(mode)) % some(1, operators // 2)
    for k in range(first, operators + 1, some(1, operators // 2)):
        fail(training, k, autocast)
        assert all(map(torch.equal, step(training, autocast), expected))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("k", some([*range(1, 40, 3)], [17]))
@pytest.mark.parametrize("name", NAMES)
def test_errors_before_anything_is_known(name, k, number):
    training, whole = (training_of(name, "always", True) for _ in range(2))
    expected = [step(whole, True) for _ in range(3)]
    for _ in range(number):
        step(training, True)
    fail(training, k, True)
    for values in expected:
        assert all(map(torch.equal, step(training, True), values))
