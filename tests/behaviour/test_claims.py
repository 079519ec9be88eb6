"""Errors and warnings of the guide, each with its sentence, so that neither changes alone.

Those that a page's own code shows are not here, and those of accelerators are in tests/virtual.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchgpipe import (
    Chunks,
    GPipe,
    MappedGPipe,
    NoChunk,
    OncePerMiniBatch,
    ScheduledLoss,
)

DOCS = Path(__file__).parents[2] / "docs"
ROWS = torch.rand(8, 4)


class Layer(nn.Module):
    """A layer that computes what it is told."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def linear(count=2):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def wrapped(*layers, balance=None, **options):
    layers = layers or (*linear(),)
    balance = [1, len(layers) - 1] if balance is None and len(layers) > 1 else balance
    options = {"chunks": 4, "checkpoint": "always"} | options
    return GPipe(nn.Sequential(*layers), balance or [1], devices=["cpu"] * 2, **options)


def step(*layers, input=ROWS, **options):
    wrapped(*layers, **options)(input).sum().backward()


def sequence_with(change):
    module = linear()
    change(module)
    return GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2)


class Own(nn.Sequential):
    def forward(self, input):
        return super().forward(input)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, input):
        return input


def on_meta(module):
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(4, 4), module())
    return GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input)


def deferred(norm):
    return GPipe(nn.Sequential(norm), [1], devices=["cpu"], chunks=2, deferred_batch_norm=True)


class Centre(OncePerMiniBatch):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, input):
        self.give(input)
        return (input - self.centre.clone()).tanh()

    def after_mini_batch(self, given):
        self.centre.copy_(given.mean(0))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Centre()

    def forward(self, input):
        return checkpoint(self.inner, input, use_reentrant=False)


@dataclass
class Unknown:
    state: torch.Tensor


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, input):
        with torch.no_grad():
            self.weight.mul_(1.1)
        return input * self.weight


class Weighed(nn.Module):
    """A layer that takes a gradient within its forward."""

    def forward(self, input):
        return torch.func.grad(lambda x: x.square().sum())(input) * input


def keeping_products():
    options = [torch.ops.aten.addmm.default]
    return partial(create_selective_checkpoint_contexts, options)


def scheduled(*layers, **options):
    model = wrapped(*layers, checkpoint=options.pop("checkpoint", "never"))
    return ScheduledLoss(model, nn.MSELoss(), **options)


def cached_weights():
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    with parametrize.cached():
        scheduled(layer, nn.Linear(4, 4))(ROWS, ROWS).backward()


def tangent():
    with torch.autograd.forward_ad.dual_level():
        wrapped()(torch.autograd.forward_ad.make_dual(ROWS, ROWS))


def compiled_around():
    model = wrapped(checkpoint="never")
    torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)(ROWS)


class Glued(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input):
        return self.second(self.first(input))


def around_map():
    model = Glued()
    model.compile(backend="eager")
    MappedGPipe(model, {"first": "cpu", "second": "cpu"}, chunks=2)(ROWS)


def changed_view():
    first = Layer(lambda x: (y := x + 0, y.view(-1)))
    step(first, Layer(lambda value: value[0].add_(1)), input=ROWS)


#: What a sentence of a page says to raise, or to warn of.
ERRORS = [
    ("gpipe", "``model.cuda()`` is a ``TypeError``", TypeError, lambda: wrapped().cuda()),
    (
        "model",
        "A ``forward``, parameters, buffers, hooks or a ``compile()``",
        TypeError,
        lambda: GPipe(Own(nn.Linear(4, 4)), [1], devices=["cpu"]),
    ),
    (
        "model",
        "A ``forward``, parameters, buffers, hooks or a ``compile()``",
        TypeError,
        lambda: sequence_with(lambda x: x.register_parameter("w", nn.Parameter(torch.ones(1)))),
    ),
    (
        "model",
        "A ``forward``, parameters, buffers, hooks or a ``compile()``",
        TypeError,
        lambda: sequence_with(lambda x: x.register_buffer("w", torch.ones(1))),
    ),
    (
        "model",
        "A ``forward``, parameters, buffers, hooks or a ``compile()``",
        TypeError,
        lambda: sequence_with(lambda x: x.register_forward_hook(print)),
    ),
    (
        "model",
        "A ``forward``, parameters, buffers, hooks or a ``compile()``",
        TypeError,
        lambda: sequence_with(lambda x: x.compile(backend="eager")),
    ),
    (
        "model",
        "raise ``TypeError``, also through a parent module",
        TypeError,
        lambda: nn.ModuleList([wrapped()]).to("meta"),
    ),
    (
        "model",
        "if it holds integers or flags, wrapping raises ``ValueError``",
        ValueError,
        lambda: on_meta(Counting),
    ),
    (
        "training",
        '``AveragedModel(model, device="cpu")`` is an error',
        TypeError,
        lambda: AveragedModel(wrapped(), device="cpu"),
    ),
    (
        "training",
        "A call of the wrapper within a ``torch.func`` transform",
        RuntimeError,
        lambda: torch.func.vmap(wrapped())(ROWS.unsqueeze(1)),
    ),
    ("training", "or with a forward-mode tangent, is an error", RuntimeError, tangent),
    (
        "training",
        "one row alone in a micro-batch is PyTorch's error",
        ValueError,
        lambda: step(nn.BatchNorm1d(4), input=ROWS[:4]),
    ),
    (
        "batchnorm",
        "``nn.SyncBatchNorm``, a lazy layer",
        TypeError,
        lambda: deferred(nn.SyncBatchNorm(4)),
    ),
    (
        "batchnorm",
        "``nn.SyncBatchNorm``, a lazy layer",
        TypeError,
        lambda: deferred(nn.LazyBatchNorm1d()),
    ),
    ("batchnorm", "a class with a ``forward`` of its own", TypeError, lambda: deferred(OwnNorm(4))),
    (
        "batchnorm",
        "and a parametrised layer",
        TypeError,
        lambda: deferred(parametrizations.weight_norm(nn.BatchNorm1d(4))),
    ),
    (
        "batchnorm",
        "``torch.utils.checkpoint`` around such a layer is an error in backward",
        RuntimeError,
        lambda: step(nn.Linear(4, 4), Checkpointed(), checkpoint="never"),
    ),
    (
        "inputs",
        "anything else is a ``ValueError``",
        ValueError,
        lambda: wrapped(Layer(torch.add), nn.Linear(4, 4))(ROWS, ROWS[:6]),
    ),
    (
        "inputs",
        "must not change it in place: on the first device that is an error",
        RuntimeError,
        lambda: wrapped(Layer(lambda x, y: x + y.add_(1)), nn.Linear(4, 4))(
            ROWS, NoChunk(torch.ones(4))
        ),
    ),
    (
        "inputs",
        "a layer that returns one is an error",
        TypeError,
        lambda: wrapped(Layer(NoChunk), nn.Linear(4, 4))(ROWS),
    ),
    (
        "inputs",
        "and so do ``repeat`` and a sequence that comes first: that is an error",
        ValueError,
        lambda: wrapped(Layer(lambda x: x.repeat(2, 1)))(ROWS),
    ),
    (
        "inputs",
        "such as a list of texts, is not split; that is a warning",
        UserWarning,
        lambda: wrapped(Layer(lambda x, _: x))(ROWS, ["text"] * 8),
    ),
    (
        "inputs",
        "One micro-batch alone is a warning",
        UserWarning,
        lambda: wrapped()(Chunks([ROWS])),
    ),
    (
        "inputs",
        "that holds tensors is a ``TypeError`` until you register it",
        TypeError,
        lambda: wrapped(Layer(lambda x: Unknown(x)), Layer(lambda x: x.state))(ROWS),
    ),
    (
        "inputs",
        "must be on ``model.devices[0]``, or it is a ``ValueError``",
        ValueError,
        lambda: wrapped()(ROWS.to("meta")),
    ),
    (
        "inputs",
        "under checkpointing, is a ``RuntimeError``, since the partition",
        RuntimeError,
        lambda: step(nn.Linear(4, 4), Layer(lambda x: x.add_(1)), nn.Linear(4, 4)),
    ),
    (
        "inputs",
        "in a later partition is a ``RuntimeError``, whatever the devices are",
        RuntimeError,
        changed_view,
    ),
    (
        "losses",
        "of a micro-batch is a warning, once per wrapper",
        UserWarning,
        lambda: wrapped(Layer(lambda x: x @ x.T))(ROWS),
    ),
    (
        "precision",
        "is a ``TypeError`` under checkpointing",
        TypeError,
        lambda: step(torch.jit.script(nn.Linear(4, 4))),
    ),
    ("precision", "``fullgraph=True`` is PyTorch's error there", Exception, compiled_around),
    (
        "schedule",
        "``loss.backward(create_graph=True)``, and a second backward, are errors",
        RuntimeError,
        lambda: scheduled()(ROWS, ROWS).backward(create_graph=True),
    ),
    ("schedule", "(``parametrize.cached()``) are PyTorch's error", RuntimeError, cached_weights),
    (
        "checkpointing",
        "Stages that are graphs refuse ``'offload'`` and policies",
        ValueError,
        lambda: scheduled(checkpoint="offload", stages="graph")(ROWS, ROWS),
    ),
    (
        "checkpointing",
        "Stages that are graphs refuse ``'offload'`` and policies",
        ValueError,
        lambda: scheduled(checkpoint=keeping_products(), stages="graph")(ROWS, ROWS),
    ),
    (
        "checkpointing",
        "need ``'never'``, which an error says",
        RuntimeError,
        lambda: step(Weighed(), nn.Linear(4, 4), input=ROWS.clone().requires_grad_(True)),
    ),
    (
        "checkpointing",
        "as by ``nn.ReLU(inplace=True)`` after a product",
        RuntimeError,
        lambda: step(
            nn.Linear(4, 4), nn.ReLU(inplace=True), balance=[2], checkpoint=keeping_products()
        ),
    ),
    (
        "checkpointing",
        "as a spectral normalisation of GANs may, is a ``RuntimeError``",
        RuntimeError,
        lambda: step(nn.Linear(4, 4), Replacing()),
    ),
    ("device_map", "not the model around them, which is an error", Exception, around_map),
]


@pytest.mark.parametrize(
    ("page", "quote", "kind", "call"), ERRORS, ids=[f"{x[0]}:{k}" for k, x in enumerate(ERRORS)]
)
def test_an_error_is_one(page, quote, kind, call):
    assert quote in " ".join((DOCS / f"{page}.rst").read_text("utf-8").split())
    check = pytest.warns if issubclass(kind, Warning) else pytest.raises
    with check(kind):
        call()
