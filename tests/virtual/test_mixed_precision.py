"""Mixed precision on several devices: each thread that issues a cell casts as the caller does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import MODES, Plain, assert_no_races
from tests.support.loops import BF16, FP16, Casting, backward_of_autocast, mean_square
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


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_a_recomputation_casts_are_not_used_after_a_step(mode, devices):
    models, found = pair(mode, devices[:3]), []
    x = torch.rand(8, 8, device=devices[0])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with torch.autocast("virtual", BF16):
            loss = mean_square(model(x))
        with torch.autocast("virtual", BF16):
            loss.backward()
            optimizer.step()
            found.append(model(x))
    verify(found[:1], found[1:])


@pytest.mark.parametrize(
    ("mode", "options"),
    [("always", {}), ("except_last", {"fused": True}), ("never", {"foreach": False})],
)
def test_scaler(mode, options, devices):
    """An overflow on one device makes the scaler skip the step on all."""
    models, found = pair(mode, devices[:3]), []
    for model in models:
        torch.manual_seed(0)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, 0.01, **options)
        scaler = torch.amp.GradScaler("virtual", init_scale=1024.0, growth_interval=2)
        for k in range(6):
            x = torch.randn(8, 8).to(devices[0])
            optimizer.zero_grad()
            with torch.autocast("virtual", FP16):
                loss = mean_square(model(x))
            scaler.scale(loss).backward()
            bad = {2: parameters[0], 3: parameters[-1]}.get(k)
            if bad is not None:
                bad.grad[0] = torch.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.1)
            before = [p.detach().clone() for p in parameters]
            scaler.step(optimizer)
            scaler.update()
            kept = [torch.equal(p, old) for p, old in zip(parameters, before)]
            assert {*kept} == {bad is not None}
            found.append([torch.tensor(scaler.get_scale()), loss, *before])
    # The norm is a sum over devices, in another order.
    seen, expected = ([[x.cpu() for x in step] for step in k] for k in (found[:6], found[6:]))
    torch.testing.assert_close(seen, expected)
    assert [step[0] for step in found[:6]] == [1024, 2048, 1024, 512, 512, 1024]


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
