"""Layers that draw random numbers, or may begin to, beside layers of other workers."""

import threading
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchgpipe import GPipe, ScheduledLoss, is_recomputing


class Meeting:
    """A place where cells of two workers meet, so that they do run side by side."""

    def __init__(self):
        self.barrier, self.met = threading.Barrier(2), 0

    def wait(self):
        """Wait a moment for another cell."""
        try:
            self.barrier.wait(0.003)
            self.met += 1
        except threading.BrokenBarrierError:
            self.barrier.reset()


class Layer(nn.Module):
    """A layer that draws twice if an object says so, and meets another cell in between."""

    def __init__(self, around="nothing"):
        super().__init__()
        self.linear, self.around = nn.Linear(3, 3), around
        # Nobody looks into a list.
        self.draws, self.meeting = [False], [None]
        #: Whether checkpoints are left out, as they are in the reference.
        self.is_plain = [False]
        self.calls = 0

    def compute(self, x):
        y = self.linear(x).sin()
        if self.draws[0]:
            y = y * torch.rand(y.shape)
        if self.meeting[0] is not None:
            self.meeting[0].wait()
        if self.draws[0]:
            y = (y * torch.rand(y.shape)).sin()
        return y

    def checkpoint(self, function, x, **options):
        """Call a function in a checkpoint of PyTorch."""
        if self.is_plain[0]:
            return function(x)
        return checkpoint(function, x, use_reentrant=False, **options)

    def forward(self, x):
        # A counter, which changes in each step.
        self.calls += not is_recomputing()
        return AROUND[self.around](self, x)


def within(layer, x):
    """A checkpoint in a checkpoint, each after a draw."""
    y = x * torch.rand(()) if layer.draws[0] else x

    def inner(y):
        y = y * torch.rand(()) if layer.draws[0] else y
        return layer.checkpoint(layer.compute, y).sin()

    return layer.checkpoint(inner, y)


def selective(layer, x):
    """A checkpoint that keeps the products, and finds them by a dispatch mode."""

    def policy(_, operator, *args, **kwargs):
        keep = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return layer.checkpoint(layer.compute, x, context_fn=contexts)


#: How a layer computes.
AROUND = {
    "nothing": Layer.compute,
    "checkpoint": lambda layer, x: layer.checkpoint(layer.compute, x),
    "checkpoint in a checkpoint": within,
    "selective checkpoint": selective,
}


def trainings(make, schedule="1f1b", mode="never", stages="eager", balances=((1, 1, 1), (3,))):
    """Trainings of three layers on the CPU, by balance; the last one, of one worker, is plain."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[make() for _ in range(3)])
    found = []
    for balance in balances:
        single = len(balance) == 1
        model = GPipe(layers, balance, devices=["cpu"] * len(balance), chunks=4)
        model.checkpoint = "never" if single else mode
        options = {} if single else {"schedule": schedule, "stages": stages}
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
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


def is_free(training):
    """Whether cells of the last step had generators of their own."""
    return training.__dict__["_crew"].draws.is_free
