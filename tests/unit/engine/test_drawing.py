"""Cells of the CPU take turns where they draw, and until it is known that they do not."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe, ScheduledLoss


def noisy(x):
    y = x * torch.rand(x.shape)
    time.sleep(0.0005)
    return (y * torch.rand(x.shape)).sin()


def seeded(x):
    torch.manual_seed(int(torch.randint(2**40, ())))
    return noisy(x)


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as some libraries have: it sets the generator in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.state, ctx.function = torch.get_rng_state(), function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.set_rng_state(now)
        return torch.autograd.grad(y, x, grad)[0], None


DRAWING = {
    "draws": noisy,
    "seeds": seeded,
    "checkpoint": lambda x: checkpoint(noisy, x, use_reentrant=False),
    "checkpoint of its own": lambda x: OwnCheckpoint.apply(x, noisy),
}


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), [function]

    def forward(self, x):
        return self.function[0](self.linear(x))


def trainings(function, schedule="1f1b", mode="never", stages="eager"):
    """The trainings of three layers on the CPU with three workers, and with one."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[Layer(function) for _ in range(3)])
    found = []
    for balance in ([1, 1, 1], [3]):
        model = GPipe(layers, balance, devices=["cpu"] * len(balance), chunks=4, checkpoint=mode)
        options = {"schedule": schedule, "stages": stages} if len(balance) > 1 else {}
        found.append(ScheduledLoss(model, lambda x: x.mean(), outputs=True, **options))
    return layers, found


def step(training, layers, seed, rows=8):
    """All that a step leaves behind."""
    torch.manual_seed(seed)
    x = torch.rand(rows, 3)
    layers.zero_grad()
    loss, output = training(x)
    loss.backward()
    grads = [parameter.grad.clone() for parameter in layers.parameters()]
    return [loss.detach(), output.detach(), *grads, torch.get_rng_state()]


def assert_same(found, expected):
    """Check that steps have left the same behind, but for the order of sums."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", DRAWING)
def test_layers_that_draw_take_turns(name, mode):
    layers, (training, plain) = trainings(DRAWING[name], "zero_bubble_h1", mode)
    for k in range(4):
        assert_same(step(training, layers, k), step(plain, layers, k))


class Meeting:
    """A place where cells of two workers meet, if they run at the same time."""

    def __init__(self):
        self.barrier, self.met = threading.Barrier(2), 0

    def __call__(self, x):
        try:
            self.barrier.wait(0.02)
            self.met += 1
        except threading.BrokenBarrierError:
            self.barrier.reset()
        return x.sin()

    def take(self):
        """Whether any have met since the last call."""
        met, self.met = self.met, 0
        return met > 0


def test_layers_that_draw_nothing_take_turns_in_the_first_step_of_a_kind():
    meeting = Meeting()
    layers, (training, _) = trainings(meeting)

    def run():
        step(training, layers, 0)
        return meeting.take()

    assert [run() for _ in range(3)] == [False, True, True]
    with torch.no_grad():
        assert [bool(training(torch.rand(8, 3))) and meeting.take() for _ in range(2)] == [0, 1]
    # A layer alone may be in another mode, as dropout is for estimates of doubt.
    layers[1].linear.eval()
    assert [run() for _ in range(2)] == [False, True]
    layers[1].linear.train()
    assert run()


def test_layers_that_begin_to_draw_are_an_error_once():
    meeting = Meeting()
    layers, (training, plain) = trainings(meeting)
    for k in range(2):
        assert_same(step(training, layers, k), step(plain, layers, k))
    for layer in layers:
        layer.function[0] = lambda x: noisy(meeting(x))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    message = r"random numbers from the first step on.*workers: 3, on the CPU: 3\); call the step"
    with pytest.raises(RuntimeError, match=message):
        training(torch.ones(8, 3))
    assert torch.equal(torch.get_rng_state(), state)
    meeting.take()
    for k in range(3):
        assert_same(step(training, layers, k), step(plain, layers, k))
    assert not meeting.take()


class Shake(torch.autograd.Function):
    """A function that draws in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(grad.shape)


def test_backward_that_draws_takes_turns():
    layers, (training, _) = trainings(Shake.apply)
    for k in range(3):
        step(training, layers, k)


class Locking(nn.Module):
    """A layer that draws while it holds a lock that layers of other workers take, too."""

    lock = threading.Lock()

    def forward(self, x):
        x = noisy(x)
        with self.lock:
            return noisy(x)


@pytest.mark.filterwarnings("ignore:a stage must be traceable")
@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_cells_that_draw_wait_for_nobody_else(stages):
    """Neither for a lock of layers, nor for a thread that traces a stage."""
    layers, (training, plain) = trainings(Locking(), stages=stages)

    def run():
        for k in range(4):
            # Other rows are another graph.
            assert_same(step(training, layers, k, 8 + k), step(plain, layers, k, 8 + k))
        ended.append(True)

    ended = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert ended


def test_numbers_are_those_of_gpipe():
    layers = nn.Sequential(*[Layer(noisy) for _ in range(3)])
    model = GPipe(layers, [1] * 3, devices=["cpu"] * 3, chunks=4, checkpoint="never")
    training = ScheduledLoss(model, lambda x: x.mean(), outputs=True)
    x = torch.rand(8, 3)
    for _ in range(2):
        torch.manual_seed(0)
        expected = model(x)
        drawn = torch.rand(3)
        torch.manual_seed(0)
        _, output = training(x)
        assert torch.equal(output, expected)
        assert torch.equal(torch.rand(3), drawn)
