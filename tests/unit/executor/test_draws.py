"""Cells of the CPU take turns while layers draw random numbers, and go side by side else."""

import time

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, ScheduledLoss, is_recomputing


class Draw(nn.Module):
    """A layer that draws if it is told so."""

    def __init__(self, draws):
        super().__init__()
        # Nobody looks into a list.
        self.draws, self.linear = [draws], nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return y + torch.rand(()) if self.draws[0] else y


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
    training.model[0].draws[0] = True
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


class Sometimes(nn.Module):
    """A layer that draws for a reason that can be seen, or cannot, and takes its time."""

    def __init__(self, reason):
        super().__init__()
        self.linear, self.reason = nn.Linear(3, 3), reason
        self.switch, self.calls, self.hidden = 0, 0, [False]
        self.rrelu = nn.RReLU(0.1, 0.9) if reason == "data" else None
        self.drawn = []

    def forward(self, x):
        y = self.linear(x).sin()
        time.sleep(0.001)
        self.calls += self.reason == "counter" and not is_recomputing()
        if self.reason == "data":
            return self.rrelu(y)
        if self.switch or (self.reason == "counter" and self.calls > 8) or self.hidden[0]:
            noise = torch.rand(y.shape)
            if not is_recomputing():
                self.drawn.append(noise)
            time.sleep(0.001)
            return (y * noise).sin()
        return y


def sometimes(reason, mode="never", stages="eager"):
    torch.manual_seed(0)
    layers = nn.Sequential(*[Sometimes(reason) for _ in range(3)])
    if reason == "data":
        for layer in layers:
            nn.init.ones_(layer.linear.weight)
            nn.init.zeros_(layer.linear.bias)
    model = GPipe(layers, [1] * 3, devices=["cpu"] * 3, chunks=4, checkpoint=mode)
    return ScheduledLoss(model, lambda x: x.mean(), outputs=True, stages=stages)


@pytest.mark.parametrize("reason", ["switch", "counter", "data"])
def test_numbers_of_the_first_step_that_draws(reason):
    outputs = []
    for training in (sometimes(reason), sometimes(reason).model):
        for number in range(4):
            torch.manual_seed(1)
            x = torch.rand(8, 3) - (0.9 if reason == "data" and number > 1 else 0)
            if reason == "switch" and number == 2:
                for layer in training.modules():
                    layer.switch = 1
            output = training(x)
            outputs.append(output[1] if isinstance(output, tuple) else output)
    for one, other in zip(outputs[:4], outputs[4:]):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:a stage must be traceable")
@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_gradients_of_a_step_that_draws_unexpectedly(stages):
    for _ in range(2):
        training = sometimes("hidden", "always", stages)
        x = torch.rand(8, 3)
        training(x)
        layers = [x for x in training.modules() if isinstance(x, Sometimes)]
        for layer in layers:
            layer.hidden[0] = True
        try:
            training(x)[0].backward()
        except RuntimeError as error:
            pytest.fail(str(error))
        assert training.__dict__["_crew"].draws._free
        y = x
        for layer in layers:
            y = (layer.linear(y).sin() * torch.cat(layer.drawn)).sin()
        expected = torch.autograd.grad(y.mean(), [*training.parameters()])
        for parameter, grad in zip(training.parameters(), expected):
            torch.testing.assert_close(parameter.grad, grad)
