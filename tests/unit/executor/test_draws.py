"""Cells of the CPU take turns while layers draw random numbers, and go side by side else."""

import time

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, ScheduledLoss


class Draw(nn.Module):
    """A layer that draws if it is told so."""

    def __init__(self, draws):
        super().__init__()
        self.draws, self.linear = draws, nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return y + torch.rand(()) if self.draws else y


def training_of(draws):
    layers = nn.Sequential(Draw(draws), Draw(draws))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)
    return ScheduledLoss(model, lambda x: x.mean())


def step(training):
    training(torch.rand(4, 3)).backward()
    return training.__dict__["_crew"].draws._free


@pytest.mark.parametrize("draws", [False, True])
def test_turns_are_taken_until_nothing_was_drawn(draws):
    training = training_of(draws)
    assert [step(training) for _ in range(3)] == [False, not draws, not draws]


def test_layers_that_change_between_training_and_evaluation():
    training = training_of(False)
    step(training)
    training.model.partitions[0].eval()
    assert [step(training) for _ in range(2)] == [False, True]


def test_layer_that_begins_to_draw():
    training = training_of(False)
    step(training)
    training.model[0].draws = True
    before = torch.get_rng_state()
    assert step(training)
    # The numbers are not drawn again.
    assert not torch.equal(before, torch.get_rng_state())
    assert [step(training) for _ in range(2)] == [False, False]


def test_caller_draws_on_where_micro_batches_have_drawn():
    training = training_of(True)
    torch.manual_seed(0)
    step(training)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    training.model(torch.rand(4, 3))
    assert torch.equal(drawn, torch.rand(3))


def test_probability_that_changes():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)) for _ in range(2)])
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    training = ScheduledLoss(model, lambda x: x.mean())
    found = [step(training) for _ in range(2)]
    layers[1][1].p = 0.5
    found += [step(training) for _ in range(2)]
    assert found == [False, True, False, False]


class Noise(nn.Module):
    """A layer that draws, and takes its time, in which another thread may draw."""

    def forward(self, x):
        y = x + torch.rand(x.shape)
        time.sleep(0.001)
        return y + torch.rand(x.shape)


def test_numbers_are_those_of_gpipe():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), Noise()) for _ in range(3)])
    model = GPipe(layers, [1] * 3, devices=["cpu"] * 3, chunks=4, checkpoint="never")
    training = ScheduledLoss(model, lambda x: x.mean(), outputs=True)
    x = torch.rand(8, 3)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    _, output = training(x)
    assert torch.equal(output, expected)


class Checkpointed(nn.Module):
    """A layer that sets the generator in its backward, for a time."""

    def forward(self, x):
        return Slow.apply(x)


class Slow(torch.autograd.Function):
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
    layers = [nn.Sequential(nn.Linear(3, 3), Noise(), Checkpointed()) for _ in range(3)]
    model = GPipe(nn.Sequential(*layers), [1] * 3, devices=["cpu"] * 3, chunks=6)
    model.checkpoint = "never"
    training = ScheduledLoss(model, lambda x: x.mean(), outputs=True)
    x = torch.rand(12, 3)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    _, output = training(x)
    assert torch.equal(output, expected)
