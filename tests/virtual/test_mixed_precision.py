"""Mixed precision on several devices: each thread that issues a cell casts as the caller does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import MODES, Plain, assert_no_races
from tests.support.loops import BF16, Casting, backward_of_autocast
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.testing import observe


def layers():
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 4),
    )


#: Where the partitions sit.
LAYOUTS = pytest.mark.parametrize("layout", [(0, 1, 2), (0, 0, 0), (0, 1, 0)], ids=str)


def pair(mode, places):
    """A wrapped model, and the plain one on the micro-batches one after another, on one device."""
    module = layers().to(places[0])
    plain = Plain(copy.deepcopy(module), 4)
    return GPipe(module, [2, 2, 2], devices=places, chunks=4, checkpoint=mode), plain


def verify(found, expected):
    found, expected = ([x.detach().cpu() for x in tensors] for tensors in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["outside", "within", "in the other dtype"])
@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode, layout, where, devices):
    """Autocast is around forward alone, around backward too, or another one around backward."""
    models = pair(mode, [devices[k] for k in layout])
    x = torch.rand(8, 8, device=devices[0])
    with observe(jitter=1) as seen:
        for model in models:
            backward_of_autocast(model, x, BF16, where)
    assert_no_races(seen)
    verify(*[[p.grad for p in model.parameters()] for model in models])


@pytest.mark.parametrize("kind", ["GPipe", "ScheduledLoss", "MappedGPipe"])
def test_layers_that_enter_autocast_in_a_worker(kind, devices):
    """A worker forgets casts of weights as the caller does, so the next step has none of them."""
    layers = nn.Sequential(nn.Linear(4, 4), Casting(BF16), nn.Linear(4, 4))
    x, target = torch.rand(8, 4), torch.rand(8, 4)
    expected = losses(layers, lambda: F.mse_loss(layers(x), target))
    cpu = torch.device("cpu")
    places = devices[:3] if kind == "MappedGPipe" else [cpu, *devices[:2]]
    if kind == "MappedGPipe":
        model = MappedGPipe(layers, dict(zip("012", places)), chunks=2, threads=3)
    else:
        model = GPipe(layers, [1, 1, 1], devices=places, chunks=2, checkpoint="never")
    scheduled = ScheduledLoss(model, F.mse_loss, "1f1b") if kind == "ScheduledLoss" else None

    def call():
        if scheduled is not None:
            return scheduled(x, target)
        return F.mse_loss(model(x.to(places[0])), target.to(places[-1]))

    torch.testing.assert_close(losses(layers, call), expected, rtol=0, atol=1e-4)


def losses(layers, call):
    """The losses of four steps, between which all weights change their signs."""
    found = []
    for _ in range(4):
        found.append(call().detach().cpu())
        with torch.no_grad():
            for p in layers.parameters():
                p.mul_(-1)
    return found
