"""Cells of the CPU draw side by side, and take turns until it is known that they may."""

import threading
import time

import pytest
import torch
from torch import nn

from tests.support.drawing import (
    AROUND,
    Layer,
    Meeting,
    assert_same,
    is_free,
    step,
    trainings,
)
from tests.support.size import some
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.engine import drawing as draws


def switch(layers, draws, meeting=None, is_plain=False):
    """Have layers draw or not, meet other cells, and do without checkpoints of PyTorch."""
    for layer in layers:
        layer.draws[0], layer.meeting[0], layer.is_plain[0] = draws, meeting, is_plain


def test_turns_are_taken_in_the_first_step_of_a_kind():
    layers, (training, _) = trainings(Layer)
    found = []
    for k, drawing in enumerate([False, False, True, False]):
        switch(layers, drawing)
        step(training, layers, k)
        found.append(is_free(training))
    assert found == [False, True, True, True]
    with torch.no_grad():
        assert [training(torch.rand(8, 3)) and is_free(training) for _ in range(2)] == [False, True]
    training.model.eval()
    assert [step(training, layers, 0) and is_free(training) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("drawing", [False, True])
def test_cells_run_side_by_side(drawing):
    """Each waits for another one. The layers count their calls, too."""
    layers, (training,) = trainings(Layer, balances=[(1, 2)])
    switch(layers, drawing)
    for k in range(2):
        step(training, layers, k)
    barrier = threading.Barrier(2, timeout=30)

    def meet(layer, call):
        def hook(*_):
            if layer.calls % 4 == call:
                barrier.wait()

        layer.linear.register_forward_hook(hook)

    # The second stage's first cell, and the first stage's second one.
    meet(layers[0], 2)
    meet(layers[1], 1)
    for k in range(3):
        step(training, layers, k)
    assert not barrier.broken


CASES = [
    ("nothing", "1f1b", "never"),
    ("nothing", "zero_bubble_h1", "always"),
    ("checkpoint", "1f1b", "never"),
    ("checkpoint in a checkpoint", "1f1b", "always"),
    ("selective checkpoint", "1f1b", "never"),
]


@pytest.mark.parametrize(("around", "schedule", "mode"), CASES)
def test_numbers_of_layers_that_begin_to_draw(around, schedule, mode):
    assert around in AROUND
    layers, (training, plain) = trainings(lambda: Layer(around), schedule, mode)
    meeting, free = Meeting(), 0
    for k in range(some(20, 8)):
        drawing = k > 2 and k % 3 > 0
        switch(layers, drawing, meeting)
        found = step(training, layers, k)
        free += drawing and is_free(training)
        switch(layers, drawing, is_plain=True)
        assert_same(found, step(plain, layers, k))
    assert meeting.met
    assert free > 1


class Negative(nn.Module):
    """A layer that draws where its data is negative."""

    def __init__(self):
        super().__init__()
        self.linear, self.rrelu = nn.Linear(3, 3), nn.RReLU(0.1, 0.9)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.shift = [0.0]

    def forward(self, x):
        return self.rrelu(self.linear(x) - self.shift[0])


@pytest.mark.parametrize("mode", ["never", "always"])
def test_numbers_where_the_data_decides(mode):
    layers, (training, plain) = trainings(Negative, mode=mode)
    for k in range(4):
        layers[0].shift[0] = 0.5 if k > 1 else 0.0
        assert_same(step(training, layers, k), step(plain, layers, k))


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


def noisy(x):
    y = x * torch.rand(x.shape)
    time.sleep(0.0005)
    return (y * torch.rand(x.shape)).sin()


def seeded(x):
    torch.manual_seed(int(torch.randint(2**40, ())))
    return noisy(x)


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        y = noisy(x)
    return noisy(y)


class Setting(nn.Module):
    """A layer that may set the default generator."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), [function]

    def forward(self, x):
        return self.function[0](self.linear(x))


SETTING = {
    "seeds": seeded,
    "forks": forked,
    "checkpoint of its own": lambda x: OwnCheckpoint.apply(x, noisy),
}


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", SETTING)
def test_layers_that_set_the_generator_take_turns(name, mode):
    layers, (training, plain) = trainings(lambda: Setting(SETTING[name]), mode=mode)
    for k in range(1, 4):
        assert_same(step(training, layers, k), step(plain, layers, k))
        assert not is_free(training)


def test_layers_that_begin_to_set_the_generator_take_turns_from_the_next_step_on():
    layers, (training, plain) = trainings(lambda: Setting(noisy))
    for k in range(2):
        assert_same(step(training, layers, k), step(plain, layers, k))
    for layer in layers:
        layer.function[0] = seeded
    for either in (training, plain):
        step(either, layers, 2)
        assert is_free(either)
    for k in range(3, 5):
        assert_same(step(training, layers, k), step(plain, layers, k))
        assert not is_free(training)


def test_layers_that_set_the_generator_now_and_then_take_turns_for_good():
    layers, (training, _) = trainings(lambda: Setting(noisy))
    free = []
    for k in range(8):
        for layer in layers:
            layer.function[0] = seeded if k % 3 == 2 else noisy
        step(training, layers, k)
        free.append(is_free(training))
    assert free == [False, True, True, False, True, True, False, False]


class Shake(torch.autograd.Function):
    """A function that draws in its backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(grad.shape)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("first", [lambda x: x, noisy], ids=["alone", "too"])
def test_numbers_of_backward(first, schedule):
    layers, found = trainings(
        lambda: Setting(lambda x: Shake.apply(first(x))),
        *(schedule, "always"),
        balances=[(1, 1, 1), (1, 2), (2, 1), (3,)],
    )
    before = None
    for k in range(3):
        *others, plain = [step(training, layers, k) for training in found]
        for other in others:
            assert_same(other, plain)
        # The next step has other numbers.
        assert before is None or not torch.equal(before, plain[-1])
        before = plain[-1]
    torch.manual_seed(5)
    x = torch.rand(8, 3)
    grads = []
    for _ in range(2):
        layers.zero_grad()
        found[0](x)[0].backward()
        grads.append(layers[0].linear.weight.grad.clone())
    assert not torch.equal(*grads)


class Locking(nn.Module):
    """A layer that draws while it holds a lock that layers of other workers take, too."""

    lock = threading.Lock()

    def __init__(self):
        super().__init__()
        self.linear, self.draws = nn.Linear(3, 3), [False]

    def forward(self, x):
        y = self.linear(x)
        if self.draws[0]:
            y = noisy(y)
            with self.lock:
                y = noisy(y)
        return y.sin()


@pytest.mark.filterwarnings("ignore:a stage must be traceable")
@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_cells_that_draw_wait_for_nobody(stages):
    """Neither for a lock of layers, nor for a thread that traces a stage."""
    layers, (training, plain) = trainings(Locking, stages=stages)

    def run():
        for k in range(some(8, 5)):
            for layer in layers:
                layer.draws[0] = k > 1
            # Other rows are another graph.
            assert_same(step(training, layers, k, 8 + k), step(plain, layers, k, 8 + k))
        ended.append(True)

    ended = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert ended


def test_numbers_are_those_of_gpipe():
    layers = nn.Sequential(*[Setting(noisy) for _ in range(3)])
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


class Slow(torch.autograd.Function):
    """A function that sets the generator in its backward, for a time."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            time.sleep(0.001)
        return grad


def test_backward_that_sets_the_generator():
    layers, (training, plain) = trainings(lambda: Setting(lambda x: Slow.apply(noisy(x))))
    for k in range(3):
        assert_same(step(training, layers, k), step(plain, layers, k))


@pytest.mark.parametrize("mode", ["never", "always"])
def test_turns_are_always_taken_where_draws_cannot_be_seen(mode, monkeypatch):
    monkeypatch.setattr(draws, "can_see_draws", lambda: False)
    layers, (training, plain) = trainings(lambda: Setting(noisy), mode=mode)
    for k in range(3):
        assert_same(step(training, layers, k), step(plain, layers, k))
        assert not is_free(training)
