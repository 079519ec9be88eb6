"""Layers that raise where a plan says so: in a kind of run of a certain micro-batch.

The first column of what passes between layers is the number of the micro-batch. What raises is an
operator, so graphs of stages raise, too.
"""

from collections import Counter

import torch
from torch import nn

from tests.support.helpers import MODES

#: Sizes of the data.
CHUNKS, WIDTH = 3, 4

#: What may fail.
KINDS = ("forward", "backward", "recomputation", "loss", "backward of loss")


class PlannedError(ValueError):
    """The error."""


class Plan:
    """The error to come, in a kind of run of a micro-batch, and the count of all runs."""

    def __init__(self):
        self.kind = self.number = self.error = None
        self.runs = Counter()

    def __call__(self, kind, number, error=None):
        # Where the loss is outside, it is that of the whole mini-batch.
        self.kind, self.number = kind, 0 if "loss" in kind else number
        self.error = PlannedError("as planned") if error is None else error
        return self

    def __enter__(self):
        self.runs.clear()
        return self.error

    def __exit__(self, *_):
        self.kind = None

    def comes(self, kind, marker):
        number = int(marker.flatten()[0])
        self.runs[kind, number] += 1
        if kind == "forward" and self.runs[kind, number] > 1:
            kind = "recomputation"
        if (kind, number) == (self.kind, self.number):
            if callable(self.error):
                self.error()
            else:
                raise self.error


plan = Plan()


@torch.library.custom_op("torchgpipe_contract::comes", mutates_args=())
def comes(x: torch.Tensor, marker: torch.Tensor, kind: str) -> torch.Tensor:
    """The identity, which may raise, and so may its backward."""
    plan.comes(kind, marker)
    return x.clone()


comes.register_fake(lambda x, marker, kind: torch.empty_like(x))


def _keep(ctx, inputs, output):
    _, marker, ctx.kind = inputs
    ctx.save_for_backward(marker)


def _backward(ctx, grad):
    kind = "backward" if ctx.kind == "forward" else f"backward of {ctx.kind}"
    return comes(grad, *ctx.saved_tensors, kind), None, None


comes.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    """A layer that keeps the first column, and may draw; ``comes`` says whether it may raise."""

    def __init__(self, comes=False, draws=0.0):
        super().__init__()
        self.linear, self.dropout, self.comes = nn.Linear(3, 3), nn.Dropout(draws), comes

    def forward(self, x):
        marker, x = x[:, :1], x[:, 1:]
        if self.comes:
            x = comes(x, marker.detach(), "forward")
        return torch.cat([marker, self.dropout(self.linear(x).sin())], 1)


def loss(output, target):
    """A loss that may raise."""
    output = comes(output, output[:, :1].detach(), "loss")
    return (output - target).square().mean()


def made(make, **options):
    """A model whose second layer may raise, after two steps, in which graphs are made."""
    layers = nn.Sequential(*[Layer(k == 1, 0.2) for k in range(4)])
    model = make(layers, chunks=CHUNKS, loss=loss, **options)
    for _ in range(2):
        step(model)
    return model


def step(model):
    """Take a step with always the same data and numbers; return the loss and the gradients."""
    torch.manual_seed(1)
    numbers = torch.arange(CHUNKS).repeat_interleave(2)[:, None]
    x, y = torch.cat([numbers, torch.rand(2 * CHUNKS, 3)], 1), torch.rand(2 * CHUNKS, 4)
    model.zero_grad()
    return [model.step(x.to(model.first), y.to(model.last)).cpu(), model.grads]


def kinds(model):
    """What may fail in a checkpoint mode; one of them where nothing follows an error."""
    mode = model.maker.mode
    found = [x for x in KINDS if mode != "never" or x != "recomputation"]
    return found if model.lasts else found[MODES.index(mode) :][:1]
