"""Losses and their targets."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.comparing import assert_as_plain, mean_of_squares
from tests.contract.promises import Otherwise, promise
from tests.contract.tensors import ZEROS
from tests.contract.wrapped import assert_same_grads, grads_of, linears, plain_step
from tests.support.structures import rows
from torchgpipe import NoChunk

#: The wrappers whose loss is called for each micro-batch.
INSIDE = ("ScheduledLoss", "ScheduledLoss of graphs", "Pipe")

BACKWARD = {"Pipe": Otherwise("backward is inside of the step", "does not require grad")}


def tokens(output, target, weight):
    """A mean over tokens, of which micro-batches have different numbers."""
    return ((output - target) ** 2 * weight).sum(), weight.sum()


@promise(
    "A loss that is a mean over something else than rows, as over tokens, is that of the "
    "mini-batch: where losses are inside of the wrapper, they return (sum, weight).",
    modes=True,
)
def sums_and_weights(make):
    for loss in make.some((tokens, lambda *args: (tokens(*args)[0], args[0].numel()))):
        layers = linears(3, 3, 3)
        model = make(layers, loss=loss)
        for count in (7, 8):
            x, y, weight = torch.rand(count, 3), torch.rand(count, 3), torch.rand(count, 1).round()
            total, divisor = loss(layers(x), y, weight)
            (total / divisor).backward()
            torch.testing.assert_close(model.step(x, y, weight), (total / divisor).detach())
            assert_same_grads(model, layers)


@promise(
    "A loss that says that it is a sum (reduction='sum') is one.",
    modes=True,
    otherwise=dict.fromkeys(
        INSIDE,
        Otherwise(
            "a loss of each micro-batch is a mean, or (sum, weight): an error says so",
            r"\(reduction: 'sum'\)",
        ),
    ),
)
def sums(make):
    layers, (x, y) = linears(3, 3, 3), torch.rand(2, 7, 3)
    loss = nn.MSELoss(reduction="sum")
    model = make(layers, loss=loss)
    torch.testing.assert_close(model.step(x, y), plain_step(layers, x, y, loss=loss))
    assert_same_grads(model, layers)


class Criterion(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, output, target):
        return ((output - target) * self.scale).square().mean()


@promise("A loss may be a module, whose weights get gradients.", modes=True)
def loss_modules(make):
    layers, (x, y), (plain, own) = linears(3, 3, 3), torch.rand(2, 8, 3), (Criterion(), Criterion())
    model = make(layers, loss=own)
    for _ in range(2):
        torch.testing.assert_close(model.step(x, y), plain_step(layers, x, y, loss=plain))
    assert_same_grads(model, layers)
    torch.testing.assert_close(model.all(grads_of(own)), grads_of(plain))


def of_many(output, targets, scale, power):
    one = (output - targets["a"]).abs().pow(power).mean(1)
    return (one * targets["b"][0] * scale).mean()


@promise(
    "Targets may be of any structure, as inputs; numbers, and what NoChunk marks, come whole.",
    modes=True,
    devices=True,
)
def targets(make):
    layers = linears(3, 3, 3)
    for scale in (2.0, torch.tensor(2.0), NoChunk(torch.rand(1))):
        aims = {"a": torch.rand(7, 3), "b": [torch.rand(7), None]}
        assert_as_plain(make, layers, rows(7), aims, scale, 2, loss=of_many, chunks=3)


@promise(
    "What is done to a loss is done to gradients: (loss / 4).backward() hands over a quarter, and "
    "losses of two mini-batches may be added.",
    modes=True,
    otherwise=BACKWARD,
)
def scaled_losses(make):
    layers, (x, y) = linears(3, 3, 3), torch.rand(2, 8, 3)
    model = make(layers, loss=mean_of_squares)
    (model.loss(x) / 4).backward()
    (mean_of_squares(layers(x)) / 4).backward()
    assert_same_grads(model, layers)
    (model.loss(x) + 3 * model.loss(y)).backward()
    (mean_of_squares(layers(x)) + 3 * mean_of_squares(layers(y))).backward()
    assert_same_grads(model, layers)


class Inject(torch.autograd.Function):
    """A function that adds to a gradient, as routers do for the balance of their load."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.5


class Router(nn.Linear):
    def forward(self, x):
        return Inject.apply(super().forward(x))


@promise(
    "What layers add to gradients on their own, as routers do, is added for each micro-batch, also "
    "beside a loss of sums and weights, which weight_of tells from targets.",
    modes=True,
)
def injected_gradients(make):
    layers = nn.Sequential(Router(3, 3), nn.Tanh(), Router(3, 3), nn.Tanh())
    assert_as_plain(make, layers, rows(6), chunks=3)
    layers.zero_grad()
    model = make(layers, loss=tokens, chunks=3, weight_of=lambda target, weight: weight.sum())
    x, y, weight = torch.rand(6, 3), torch.rand(6, 3), torch.rand(6, 1)
    each = [tokens(layers(a), *b) for a, *b in zip(x.chunk(3), y.chunk(3), weight.chunk(3))]
    loss = sum(total for total, _ in each) / weight.sum()
    loss.backward()
    torch.testing.assert_close(model.step(x, y, weight), loss.detach())
    assert_same_grads(model, layers)


@promise(
    "It is not multiplied by what is done to the loss.",
    modes=True,
    otherwise=dict.fromkeys(
        INSIDE[:2],
        Otherwise("the gradients of a step are multiplied all together", "^all of it"),
    )
    | BACKWARD,
)
def injected_beside_scaled(make):
    layers, x = nn.Sequential(Router(3, 3), nn.Tanh(), Router(3, 3), nn.Tanh()), torch.rand(4, 3)
    model = make(layers, loss=mean_of_squares, chunks=1)
    (model.loss(x) / 4).backward()
    (mean_of_squares(layers(x))).backward()
    quarter = {name: x / 4 for name, x in grads_of(layers).items()}
    found = model.grads
    if all(torch.allclose(found[name], x) for name, x in quarter.items()):
        raise AssertionError("all of it")
    layers.zero_grad()
    (mean_of_squares(layers(x)) / 4).backward()
    assert_same_grads(model, layers)


@promise(
    "A loss that no weight has a part in is a loss, without gradients.",
    modes=True,
    otherwise={"Pipe": ZEROS},
)
def losses_without_gradients(make):
    layers, x = linears(3, 3, 3), torch.rand(6, 3)
    model = make(layers, loss=lambda output: F.relu(output.detach()).mean(), chunks=3)
    found = model.step(x)
    torch.testing.assert_close(found, F.relu(layers(x)).mean().detach())
    grads = [x for x in model.grads.values() if x is not None]
    assert not any(x.any() for x in grads)
    assert not grads, "zeros"
