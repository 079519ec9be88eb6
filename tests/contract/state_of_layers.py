"""Norms, buffers and other state of layers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.comparing import (
    assert_as_plain,
    assert_same_buffers,
    assert_same_parameters,
    mean_of_squares,
)
from tests.contract.promises import GRAPHS, promise
from tests.contract.wrapped import assert_same_grads, plain_step
from tests.support.changing_buffers import LAYERS
from tests.support.helpers import Apply
from tests.support.once import Centre, Contrast
from tests.support.structures import rows
from torchgpipe import is_recomputing
from torchgpipe.batchnorm import DeferredBatchNorm


def between(*layers):
    """Layers in front of and after the middle, where a device begins."""
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))


def inputs(*counts):
    return [torch.randn(count, 4) for count in counts]


#: For each norm, the shape of a row.
NORMS = {
    "1d": (lambda **kw: nn.BatchNorm1d(4, **kw), (4,)),
    "1d of sequences": (lambda **kw: nn.BatchNorm1d(4, **kw), (4, 5)),
    "2d": (lambda **kw: nn.BatchNorm2d(4, **kw), (4, 3, 2)),
    "3d": (lambda **kw: nn.BatchNorm3d(4, **kw), (4, 2, 2, 2)),
    "instance 1d": (lambda **kw: nn.InstanceNorm1d(4, track_running_stats=True, **kw), (4, 5)),
    "instance 2d": (lambda **kw: nn.InstanceNorm2d(4, affine=True, **kw), (4, 3, 2)),
}


# Deferred norms.


def checked_deferred(make, batches, converted=True, **options):
    """Check that deferred norms have the statistics of mini-batches, whatever the micro-batches."""
    plain = between(nn.BatchNorm1d(4, **options), nn.Sequential(nn.BatchNorm1d(4, **options)))
    # The second norm sees what the first one has made of micro-batches.
    if converted:
        deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain))
        model = make(deferred, loss=mean_of_squares, chunks=3)
    else:
        model = make(plain, loss=mean_of_squares, chunks=3, deferred_batch_norm=True)
    for x in batches:
        model.step(x.to(model.first))
        y = plain[0](x)
        plain[1](y)
        parts = [F.batch_norm(z, None, None, training=True) for z in y.tensor_split(3)]
        plain[2](torch.cat(parts))
    assert_same_buffers(model, plain)
    return model


@promise(
    "Deferred batch norms, converted before or by deferred_batch_norm=True, update their "
    "statistics once per mini-batch, with its mean and variance, whatever the micro-batches are.",
    modes=True,
    eager=True,
    devices=True,
)
def deferred_norms(make):
    for converted in (True, False):
        model = checked_deferred(make, inputs(9, 9, 9), converted)
        assert model.buffers["1.num_batches_tracked"] == 3


@promise(
    "So they do where rows are uneven, and mini-batches change their size.", modes=True, eager=True
)
def deferred_norms_of_uneven_rows(make):
    checked_deferred(make, inputs(7, 8, 12))


@promise("So they do with the mean of all mini-batches (momentum None).", modes=True, eager=True)
def deferred_norms_without_momentum(make):
    checked_deferred(make, inputs(8, 9, 9), momentum=None)


@promise("In eval mode, deferred norms use their statistics, and keep them.", eager=True)
def deferred_norms_in_eval_mode(make):
    model = checked_deferred(make, inputs(9))
    model.train(False)
    before = {name: x.clone() for name, x in model.buffers.items()}
    (x,) = inputs(8)
    one, other = (torch.cat([model.forward(y) for y in some]) for some in ((x,), x.split(4)))
    torch.testing.assert_close(one, other)
    model.step(x)
    for name, x in model.buffers.items():
        assert torch.equal(x, before[name])


# Other norms.


@promise(
    "Statistics of other norms are those of the micro-batches, one after another; computing cells "
    "again does not count them twice.",
    modes=True,
    devices=True,
)
def norms(make):
    checked_norms(make, make.some(NORMS.values()))


def checked_norms(make, norms, **options):
    for made, shape in norms:
        layers = nn.PReLU(), made(**options), nn.PReLU(), nn.Sequential(made(**options), nn.Tanh())
        x = torch.randn(7, *shape)
        assert_as_plain(make, nn.Sequential(*layers).double(), x.double(), chunks=3)


@promise("So are those that are means of all (momentum None).", modes=True, eager=True)
def norms_without_momentum(make):
    some = make.some([NORMS["1d"], NORMS["2d"], NORMS["instance 2d"], NORMS["1d of sequences"]])
    checked_norms(make, some, momentum=None)


@promise("Norms in eval mode within a model that trains keep their statistics.", modes=True)
def norms_in_eval_mode(make):
    layers = between(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    layers[2](torch.randn(9, 4))
    layers[2].eval().requires_grad_(False)
    model = assert_as_plain(make, layers, torch.randn(6, 4))
    assert model.buffers["2.num_batches_tracked"] == 1
    # And all of them in a model that does not train.
    layers.eval()
    model.train(False)
    x = torch.randn(6, 4)
    torch.testing.assert_close(model.step(x), mean_of_squares(layers(x)).detach())
    assert_same_buffers(model, layers)


# State of the mini-batch.


@promise(
    "State that a layer updates once per mini-batch (OncePerMiniBatch), before its first "
    "micro-batch and after its last one, and gradients, are those of the plain model on the whole "
    "mini-batch, in any number of rows.",
    modes=True,
    eager=True,
    devices=True,
)
def state_of_the_mini_batch(make):
    layers = between(Contrast(), Centre(), nn.Sequential(Contrast(5000), nn.Tanh()))
    model = make(layers, loss=mean_of_squares, chunks=3)
    for x in inputs(7, 8, 2):
        layers.zero_grad()
        model.zero_grad()
        expected = plain_step(layers, x, loss=mean_of_squares)
        torch.testing.assert_close(model.step(x.to(model.first)).cpu(), expected)
        assert_same_grads(model, layers)
        assert_same_buffers(model, layers)
        assert_same_parameters(model, layers)


@promise("In eval mode such state stays as it is.", eager=True)
def state_of_the_mini_batch_in_eval_mode(make):
    model = make(between(Contrast(), Centre()), loss=mean_of_squares).train(False)
    before = {name: x.clone() for name, x in [*model.buffers.items(), *model.parameters.items()]}
    for x in inputs(8, 8):
        model.step(x)
    for name, x in [*model.buffers.items(), *model.parameters.items()]:
        assert torch.equal(x, before[name]), name


# Other buffers.


@promise(
    "Buffers that layers change in their forward, in whatever way (spectral norm, codebooks, "
    "moving averages), and gradients that come from them, are those of micro-batches one after "
    "another.",
    modes=True,
    eager=True,
    devices=True,
)
def changing_buffers(make):
    for made in make.some(LAYERS.values()):
        layers = between(made(), nn.Tanh(), made(), nn.Tanh())
        assert_as_plain(make, layers, torch.randn(6, 4), chunks=3, steps=3)


class Count(nn.Module):
    """A layer that counts rows in a buffer."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.how = how

    def forward(self, x):
        y = (x / (1 + self.count)).exp()
        if self.how == "replaced":
            self.count = self.count + len(x)
        elif not (self.how == "held back" and is_recomputing()):
            self.count.add_(len(x))
        return y


@promise(
    "A counter in a buffer counts each micro-batch once, whether the layer adds to it, replaces "
    "it, or asks is_recomputing() first; and gradients are of the count that each has found.",
    modes=True,
    eager=True,
)
def counters(make):
    for how in ("replaced", "in place", "held back"):
        layers = between(Count(how), nn.Tanh(), Count(how))
        assert_as_plain(make, layers, torch.rand(6, 4), chunks=3, steps=3)


class Seldom(nn.Module):
    """A layer that changes its buffer when it is switched on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.on = False

    def forward(self, x):
        if self.on:
            self.scale += 1
        return (x / self.scale.clone()).exp()


@promise(
    "A layer may begin to change a buffer in a later step, under checkpointing one of up to 64 KiB."
)
def buffers_that_change_late(make):
    layers = nn.Sequential(nn.Linear(3, 3), Seldom(), nn.Tanh(), nn.Linear(3, 3))
    models = [make(layers, loss=mean_of_squares, mode=mode) for mode in ("always", "never")]
    x = rows(8, requires_grad=False)
    for on in (False, False, True, True):
        for model in models:
            model.layers[1].on = on
            model.zero_grad()
            model.step(x)
        torch.testing.assert_close(models[0].buffers, models[1].buffers)
        torch.testing.assert_close(models[0].grads, models[1].grads)


class Memory(nn.Module):
    """A buffer that carries its gradient from micro-batch to micro-batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("memory", torch.ones(4))

    def forward(self, input):
        self.memory.mul_(0.5).add_((input * self.weight).mean(0))
        return (input * self.memory.clone()).sin()


class Whiten(nn.Module):
    """A layer of which autograd saves a buffer, and that writes to it for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(2)
        return x * self.scale


@promise(
    "A buffer that is written to may be saved for backward under checkpointing, which computes the "
    "values again.",
    eager=True,
)
def saved_buffers(make):
    layers = between(Whiten(), nn.Tanh())
    assert_as_plain(make, layers, torch.rand(6, 4), chunks=3, mode="always")


# Parameters.


class Moving(nn.Module):
    """A layer that gives a parameter other memory in its forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.scale.data = 0.5 * self.scale.data + 0.5 * x.detach().abs().mean(0)
        return (x / self.scale.clone()).tanh()


@promise(
    "Under checkpointing, a layer that changes a parameter in its forward is an error that names "
    "both.",
    fails=True,
    eager=True,
)
def changing_parameters(make):
    layers = between(Moving(), nn.Tanh())
    model = make(layers, loss=mean_of_squares, chunks=2, mode="always")
    error = model.raised(model.step, torch.randn(4, 4))
    assert error.kind == "RuntimeError"
    assert "(layer: Moving, parameter: scale)" in error.text


@promise("Statistics and gradients are those of the mode that layers are in, from step to step.")
def train_and_eval(make):
    layers = between(nn.BatchNorm1d(4), nn.Dropout(1.0), Apply(torch.tanh))
    model = make(layers, loss=mean_of_squares, chunks=2)
    for mode in (True, False, True, False)[: 2 if make.wrapper == GRAPHS else 4]:
        x = rows(6, 4, requires_grad=False)
        model.train(mode)
        layers.train(mode)
        if mode:
            expected = plain_step(layers, x, loss=mean_of_squares, chunks=2)
        else:
            expected = mean_of_squares(layers(x)).detach()
        torch.testing.assert_close(model.step(x), expected)
        assert_same_buffers(model, layers)
    if mode:
        assert_same_grads(model, layers)
