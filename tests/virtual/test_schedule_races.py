"""Schedules wait for the caller, and the caller for them, and memory is not reused too early."""

import pytest
import torch
from torch import nn

from tests.support.changing_buffers import Average
from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.schedules import workers_of
from tests.support.size import some
from tests.virtual.stages import ONE_MODE, own_streams, squares
from torchgpipe import ScheduledLoss
from torchgpipe.schedule import parse
from torchgpipe.testing import Busy, observe

SEEDS = range(some(20, 2))
WIDTH = 64


def stage():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Busy(features=WIDTH))


def training_of(name, devices, mode="except_last", layer=stage, **options):
    model = wrap([layer() for _ in devices], devices, mode, 4)
    return ScheduledLoss(model, squares, name, **options)


def backward_by_hand(loss, weights):
    for weight, grad in zip(weights, torch.autograd.grad(loss, weights)):
        weight.grad = grad


def train(training, *, own=False, steps=3, target_on=-1, by_hand=False):
    """Train some steps, whose tensors the caller frees and changes as soon as it can."""
    devices = training.model.devices
    optimizer = torch.optim.SGD(training.parameters(), lr=0.1)
    for seed in SEEDS:
        with own_streams(dict.fromkeys(devices), own), observe(jitter=seed) as seen:
            for _ in range(steps):
                x = torch.rand(8, WIDTH, device=devices[0]).requires_grad_()
                y = torch.rand(8, WIDTH, device=devices[target_on])
                found = training(x, y)
                # The caller's memory is free for others, whatever is still computed.
                del y
                y = torch.rand(8, WIDTH, device=devices[target_on])
                loss, *output = found if isinstance(found, tuple) else (found,)
                if by_hand:
                    backward_by_hand(loss, [*training.parameters()])
                else:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del x, y, found, loss
                torch.rand(8, WIDTH, device=devices[0])
                for tensor in output:
                    tensor.add_(1)
        assert_no_races(seen)


@pytest.mark.parametrize("mode", MODES)
def test_workers_of_one_device(devices, mode):
    train(training_of("1f1b", [devices[0]] * 3, mode, outputs=True))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_workers_of_one_device_and_streams_of_the_caller(devices, mode):
    train(training_of("zbh1", [devices[0]] * 3, mode), own=True)


def test_gradients_that_the_caller_asks_for(devices):
    train(training_of("1f1b", [devices[0]] * 3), by_hand=True)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_workers_of_one_device_that_share_a_layer_with_state(devices, mode):
    shared = nn.Sequential(nn.BatchNorm1d(WIDTH), Average("replaced", WIDTH))
    layers = iter([stage(), shared, stage(), shared])
    train(training_of("1f1b", [devices[0]] * 4, mode, lambda: next(layers)))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_a_v(devices, mode):
    train(training_of("zbv", [devices[w] for w in workers_of("zbv")], mode, outputs=True))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_overlaps(devices, mode):
    train(training_of("dualpipe_v", [devices[w] for w in workers_of("dualpipe_v")], mode))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_hooks_of_weights(devices, mode):
    """The caller frees the result of a hook while workers compute."""
    training = training_of("dualpipe_v", [devices[w] for w in workers_of("dualpipe_v")], mode)
    for weight in training.parameters():
        weight.register_hook(lambda grad: grad.clamp(-1, 1))
    train(training)


def test_overlaps_in_the_other_order(devices):
    """A gradient of one stream is freed on the other one, where its memory may be used again."""
    line = "0F0 1F0 0F1 1B0 (0B0;1F1) 0F2 1B1 (0B1;1F2) 0F3 1B2 (0B2;1F3) 1B3 0B3"
    train(training_of(parse(line, [0, 0], 4), [devices[0]] * 2, "never"))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_targets_from_another_device(devices, mode):
    train(training_of("1f1b", devices[:3], mode), target_on=0)


def test_evaluation_with_targets_from_another_device(devices):
    """No backward makes the first device wait for the last one."""
    training = training_of("1f1b", devices[:3])
    for seed in SEEDS:
        with observe(jitter=seed) as seen, torch.no_grad():
            for _ in range(4):
                x, y = (torch.rand(8, WIDTH, device=devices[0]) for _ in range(2))
                training(x, y)
        assert_no_races(seen)


class SameBuffer(nn.Module):
    """A layer that returns one buffer each time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.buffer = None

    def forward(self, x):
        return Buffered.apply(self.linear(x), self)


class Buffered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        if layer.buffer is None:
            layer.buffer = torch.empty_like(x)
        layer.buffer.copy_(x)
        return layer.buffer.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_layer_that_returns_one_buffer_each_time(devices):
    devices = devices[:3]
    training = training_of("1f1b", devices, "never", SameBuffer)
    bandwidth = {(a.index, b.index): 64 for a in devices for b in devices if a != b}
    with observe(jitter=0, bandwidth=bandwidth) as seen:
        x, y = (torch.rand(8, WIDTH, device=devices[k]) for k in (0, -1))
        training(x, y).backward()
    assert_no_races(seen)
