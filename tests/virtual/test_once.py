"""State of the mini-batch is updated between steps and their backward, on the caller's streams."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.once import Centre, Contrast, Dino, Swapped
from torchgpipe import MappedGPipe, ScheduledLoss
from torchgpipe.testing import observe


def layers(count):
    """A layer for each partition; each has state of the mini-batch."""
    kinds = (Contrast, lambda: Contrast(5000), Centre)
    return [nn.Sequential(nn.Linear(4, 4), kinds[k % 3](), nn.Tanh()) for k in range(count)]


class Back(nn.Module):
    """A model that comes back to its first device, with a layer that gives there."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = layers(3)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def verify(step, model, plain, device, where=None):
    """Check that steps train as the plain model does, and race with nothing."""
    found, expected = [], []
    with observe(jitter=0) as seen:
        for rows in (8, 9):
            x = torch.rand(rows, 4)
            for p in model.parameters():
                p.grad = None
            step(x.to(device))
            # The caller reads state, and changes it, between steps.
            found.append([x + 0 for x in model.buffers()])
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0 if p.grad is None else 0.1 * p.grad)
            plain.zero_grad()
            plain(x).square().mean().backward()
            expected.append([x + 0 for x in plain.buffers()])
            with torch.no_grad():
                for p in plain.parameters():
                    p.sub_(0 if p.grad is None else 0.1 * p.grad)
    assert_no_races(seen)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close([x.cpu() for x in a], b)
    weights = [[x.cpu() for x in y.parameters()] for y in (model, plain)]
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("mode", [*MODES, "offload"])
@pytest.mark.parametrize("place", [[0, 1], [0, 0], [0, 1, 0]], ids=str)
def test_partitions(devices, place, mode):
    plain = nn.Sequential(*layers(len(place)))
    model = wrap([*copy.deepcopy(plain)], [devices[d] for d in place], mode, 4)
    verify(lambda x: model(x).square().mean().backward(), model, plain, devices[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_schedules(devices, mode, schedule):
    plain = nn.Sequential(*layers(3))
    model = wrap([*copy.deepcopy(plain)], devices[:3], mode, 4)
    training = ScheduledLoss(model, lambda y: y.square().mean(), schedule)
    verify(lambda x: training(x).backward(), model, plain, devices[0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (Back, {"first": 0, "second": 1, "third": 0}),
        (Dino, {"": 1, "student": 0, "teacher": 1}),
        (Swapped, {"": 0, "student": 1, "teacher": 0}),
    ],
)
def test_maps(devices, make, place, mode, threads):
    plain = make()
    where = {name: devices[d] for name, d in place.items()}
    model = MappedGPipe(copy.deepcopy(plain), where, chunks=4, checkpoint=mode, threads=threads)
    verify(lambda x: model(x).square().mean().backward(), model, plain, devices[0])


class Squares(Centre):
    """A layer that clones what a backward needs, after it has given."""

    def forward(self, x):
        self.give(x)
        y = (x * x).clone()
        return (y * y).sin() + y


def clones(context, operator, *args, **kwargs):
    kept = operator is torch.ops.aten.clone.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy(devices):
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), Squares()) for _ in range(2)])
    mode = partial(create_selective_checkpoint_contexts, clones)
    model = wrap([*copy.deepcopy(plain)], devices[:2], mode, 4)
    verify(lambda x: model(x).square().mean().backward(), model, plain, devices[0])


def test_a_forward_without_backward(devices):
    model = wrap(layers(2), [devices[0]] * 2, "never", 4)
    with observe(jitter=0) as seen, torch.no_grad():
        model(torch.rand(16, 4, device=devices[0]))
    assert_no_races(seen)
