"""Dropout and recomputation on virtual devices."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.virtual.compare import name_of, tensors


def test_dropout(devices):
    x = torch.ones(100, 100, device=devices[1]).requires_grad_()
    torch.manual_seed(3)
    first = F.dropout(x, 0.3)
    second = F.dropout(x, 0.3)
    torch.manual_seed(3)
    assert torch.equal(first, F.dropout(x, 0.3))
    assert not torch.equal(first, second)
    assert 0.28 < (first == 0).float().mean() < 0.32
    assert torch.allclose(first[first > 0], torch.tensor(1 / 0.7, device=devices[1]))
    first.sum().backward()
    assert torch.equal(x.grad, first)
    assert torch.equal(F.dropout(x, 0.3, training=False), x)
    assert not F.dropout(x, 1.0).any()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout1d(),
        nn.AlphaDropout(),
        nn.LSTM(8, 8, 2, dropout=0.5),
        nn.TransformerEncoderLayer(8, 2, 16),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_same(layer, use_reentrant, devices):
    layer, x = copy.deepcopy(layer).to(devices[1]), torch.randn(4, 6, 8, device=devices[1])
    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        output = tensors(run(leaf))[0]
        layer.zero_grad()
        output.pow(2).sum().backward()
        found.append([output.detach(), leaf.grad, *[p.grad.clone() for p in layer.parameters()]])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
