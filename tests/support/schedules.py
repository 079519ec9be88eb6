"""Models that train under schedules, and what their gradients must be equal to."""

import copy
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.size import SOAK
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.partition.split import Sequential
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.values.division import FlatInput
from torchgpipe.values.microbatch import scatter

#: For each kind of schedule with one stage per worker, and with two: names, the first for each run.
ONE = ("1f1b", "zbh1", "fill_drain", "zbh2")
TWO = ("zbv", "dualpipe_v", "interleaved", "wave", "v_half", "v_min", "looped_bfs")
TWO += ("interleaved_zero_bubble",)
#: The schedules of one run.
FEW = ("fill_drain", "1f1b", "zbh1", "zbv", "dualpipe_v")
NAMES = (*ONE, *TWO) if SOAK else FEW

#: The workers of four stages.
V, LOOP, ROW = (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 3)


def workers_of(name):
    """The workers of four stages under a schedule."""
    if name in ONE:
        return ROW
    return LOOP if name in ("interleaved", "looped_bfs", "interleaved_zero_bubble") else V


def schedule_for(case, name):
    """The schedule, or one of a V, which alone has the two stages on one worker."""
    return "zbv" if case == "weights of two stages" and workers_of(name) != V else name


class Case(NamedTuple):
    """Four layers, one for each stage, and what they are called with."""

    layers: list
    input: Any
    target: Any
    chunks: int = 4
    loss: Any = F.mse_loss
    options: Any = MappingProxyType({})


@skippable(stash=["far"])
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x).tanh()
        yield stash("far", y * 2)
        return y


@skippable(pop=["far"])
class Pop(nn.Module):
    def forward(self, x):
        far = yield pop("far")
        return x + far


@skippable(stash=["near"])
class StashNear(nn.Module):
    def forward(self, x):
        yield stash("near", (x, x.sin()))
        return x.cos()


@skippable(pop=["near"])
class PopNear(nn.Module):
    def forward(self, x):
        a, b = yield pop("near")
        return x * a + b


class Doubled(torch.autograd.Function):
    """A function that computes all its gradients or none."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Custom(nn.Module):
    """Weights in a function in Python, weights alone, views, hooks, and weights without a use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))
        self.alone = nn.Parameter(torch.rand(6))
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)

    def forward(self, x):
        y = Doubled.apply(x, self.weight)
        y = self.linear(y) @ self.weight + self.linear(self.alone) + self.linear(x.detach())
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y.view(y.shape[0], 2, 3).flatten(1)


def frozen(layer):
    return layer.requires_grad_(False)


def linear():
    return nn.Linear(6, 6)


def relu():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))


def images(**options):
    layers = [
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)),
        nn.Sequential(nn.ReLU(inplace=True), nn.GroupNorm(3, 3), nn.Conv2d(3, 2, 1)),
        nn.Sequential(nn.Flatten(), nn.Linear(32, 2)),
    ]
    return Case(layers, torch.rand(8, 2, 4, 4), torch.rand(8, 2), options=options)


def rows(count, chunks):
    return Case(
        [relu(), relu(), linear(), relu()], torch.rand(count, 6), torch.rand(count, 6), chunks
    )


def block():
    return nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0)


def tied():
    """Weights that the first and the last stage share, which are on one worker of a V."""
    first = linear()
    layers = [first, relu(), relu(), nn.Sequential(nn.Tanh(), first)]
    return Case(layers, torch.rand(8, 6), torch.rand(8, 6))


def tokens(output, target, weight):
    """A mean over tokens, of which micro-batches have different numbers."""
    return ((output - target) ** 2 * weight).sum(), weight.sum() * 6


CASES = {
    "mlp": lambda: rows(8, 4),
    "fewer micro-batches than stages": lambda: rows(4, 2),
    "transformer": lambda: Case(
        [block(), block(), block(), linear()], torch.rand(4, 3, 6), torch.rand(4, 3, 6)
    ),
    "convolutions and norms": images,
    "skips": lambda: Case(
        [Stash(), StashNear(), nn.Sequential(PopNear(), linear()), nn.Sequential(linear(), Pop())],
        torch.rand(8, 6),
        torch.rand(8, 6),
    ),
    "frozen first stages": lambda: Case(
        [frozen(linear()), frozen(relu()), linear(), relu()], torch.rand(8, 6), torch.rand(8, 6)
    ),
    "frozen middle stage": lambda: Case(
        [linear(), frozen(relu()), linear(), relu()], torch.rand(8, 6), torch.rand(8, 6)
    ),
    "input with a gradient": lambda: Case(
        [linear(), relu(), linear(), relu()], torch.rand(8, 6, requires_grad=True), torch.rand(8, 6)
    ),
    "functions of all kinds": lambda: Case(
        [linear(), Custom(), Custom(), Custom()], torch.rand(8, 6), torch.rand(8, 6)
    ),
    "deferred norms": lambda: images(deferred_batch_norm=True),
    "weights of two stages": tied,
    "sum and weight": lambda: Case(
        [linear(), relu(), linear(), relu()],
        torch.rand(7, 6),
        (torch.rand(7, 6), torch.rand(7, 1)),
        3,
        tokens,
    ),
}


def reference(case, layers):
    """Train the micro-batches one after another; return the loss."""
    batches = scatter(case.input, case.chunks)
    targets = targets_of(case)
    total = len(targets[0])
    counts = FlatInput(case.input).division(case.chunks).rows or [total]
    starts = accumulate(counts, initial=0)
    found = []
    for batch, start, count in zip(batches, starts, counts):
        output = batch.call(Sequential(*layers)).value
        found.append(case.loss(output, *[x[start : start + count] for x in targets]))
    if isinstance(found[0], tuple):
        loss = sum(x for x, _ in found) / sum(weight for _, weight in found)
    else:
        loss = sum(x * count / total for x, count in zip(found, counts))
    loss.backward()
    return loss.detach()


def targets_of(case):
    return case.target if isinstance(case.target, tuple) else (case.target,)


def training_of(case, layers, name, devices, mode, **options):
    """A scheduled loss over layers, on the devices of the workers."""
    model = GPipe(
        nn.Sequential(*layers),
        [1] * len(layers),
        devices=[devices[w] for w in workers_of(name)],
        chunks=case.chunks,
        checkpoint=mode,
        **case.options,
    )
    return ScheduledLoss(model, case.loss, name, **options)


def compare(case, name, devices, mode, steps=2, **options):
    """Check that steps under a schedule have the loss, gradients and buffers of the reference."""
    torch.manual_seed(1)
    layers = copy.deepcopy(case.layers)
    training = training_of(case, copy.deepcopy(case.layers), name, devices, mode, **options)
    model = training.model
    input = moved_input(case.input, model.devices[0])
    targets = [x.to(model.devices[-1]) for x in targets_of(case)]
    for _ in range(steps):
        expected = reference(case, layers)
        loss = training(input, *targets)
        loss.backward()
        torch.testing.assert_close(loss.cpu(), expected)
    plain = nn.Sequential(*layers)
    for own, other in zip(model.parameters(), plain.parameters()):
        same(own.grad, other.grad)
    if case.options:
        # Norms that are deferred have the whole mini-batch in mind, as under GPipe.
        plain = GPipe(
            nn.Sequential(*copy.deepcopy(case.layers)),
            [4],
            devices=["cpu"],
            chunks=case.chunks,
            **case.options,
        )
        for _ in range(steps):
            plain(case.input)
    for own, other in zip(model.buffers(), plain.buffers()):
        same(own, other)
    same(input.grad, case.input.grad)
    return training


def same(own, other):
    assert (own is None) == (other is None)
    if own is not None:
        torch.testing.assert_close(own.cpu(), other, rtol=1e-4, atol=1e-6)


def moved_input(x, device):
    return x.detach().to(device).requires_grad_(x.requires_grad)
