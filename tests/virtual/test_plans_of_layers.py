"""Plans of layers that share weights, see micro-batches, or get something whole."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import NoChunk, plan
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")


class Tied(nn.Module):
    """Layer with the weight of another one."""

    def __init__(self, other):
        super().__init__()
        self.weight = other.weight

    def forward(self, input):
        return F.linear(input, self.weight)


def tied_layers():
    layers = [nn.Linear(8, 8) for _ in range(5)]
    return nn.Sequential(*layers, Tied(layers[0]))


def test_layers_that_share_a_weight_are_on_one_device(devices):
    layers = tied_layers()
    x, y = torch.rand(16, 8), torch.rand(16, 8)
    options = {"devices": devices[:2], "timeout": 0, "chunks": [4]}
    with observe(costs={"addmm": 1, "mm": 1}):
        plans = plan(layers, x, loss=F.mse_loss, targets=(y,), **options)
    assert plans.candidates
    for candidate in plans.candidates:
        own = [d for n, d in zip(candidate.balance, candidate.devices) for _ in range(n)]
        assert own[0] == own[-1]
    training = plans.best.wrap(layers)
    training(x.to(devices[0]), y).backward()
    with (
        observe(costs={"addmm": 1, "mm": 1}),
        pytest.raises(ValueError, match=r"share a weight.*layers: 0 and 5"),
    ):
        plan(tied_layers(), x, **options)


def test_batch_normalisations(devices):
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    x = torch.rand(16, 8)
    options = {"devices": devices[:2], "timeout": 0}
    with observe(costs={"addmm": 1, "mm": 1}):
        with pytest.warns(UserWarning, match="batch normalisations see micro-batches"):
            plans = plan(layers, x, **options)
        assert max(c.chunks for c in [*plans.candidates, *plans.misfits]) == 8
        model = plan(layers, x, **options, chunks=[4]).best.wrap(layers, deferred_batch_norm=True)
    model(x.to(devices[0]))
    assert model[1].num_batches_tracked == 1


def test_tied_layers_far_apart_are_kept_together(devices):
    """The first cut has them together: there are too many balances to try all."""
    layers = [nn.Linear(8, 8) for _ in range(20)]
    layers[14] = Tied(layers[0])
    with observe(costs={"addmm": 1, "mm": 1}):
        plans = plan(
            nn.Sequential(*layers), torch.rand(16, 8), devices=devices[:4], timeout=0, chunks=[4, 8]
        )
    assert {c.chunks for c in plans.candidates} == {4, 8}
    assert all(c.balance[0] == 15 for c in plans.candidates)


class Regularised(nn.Module):
    """A loss that uses a weight of a layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, output, target):
        return F.mse_loss(output, target) + self.weight.square().sum()


def test_loss_that_shares_a_weight(devices):
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    loss, (x, y) = Regularised(layers[0].weight), torch.rand(2, 16, 8)
    with observe(costs={"addmm": 1, "mm": 1}):
        best = plan(
            layers, x, devices=devices[:2], loss=loss, targets=(y,), timeout=0, chunks=[4]
        ).best
    assert best.devices[0] == best.devices[-1]
    best.wrap(layers)(x.to(devices[0]), y).backward()


class Added(nn.Module):
    """A first layer with a second argument that every micro-batch gets whole."""

    def forward(self, x, other):
        return x + other.sum()


def test_what_goes_whole_has_no_rows(devices):
    layers = nn.Sequential(Added(), *[nn.Linear(8, 8) for _ in range(3)])
    sample = torch.rand(32, 8), NoChunk(torch.rand(500))
    with observe(costs={"addmm": 1, "mm": 1}):
        plans = plan(layers, sample, devices=devices[:2], timeout=0)
    assert max(c.chunks for c in plans.candidates) == 32
