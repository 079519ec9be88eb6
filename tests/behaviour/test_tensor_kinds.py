"""Layers may compute with any kind of tensor, under checkpointing too."""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import plain, same_gradients
from tests.support.tensor_kinds import KINDS, Compute
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, verify_recomputation

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def whole(output, _):
    return output.square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Compute(kind), nn.Linear(4, 4))
    x = torch.rand(7, 4) - 0.5
    whole(plain(layers, x, 2), x).backward()
    own = {"devices": ["cpu"] * 2, "chunks": 2, "checkpoint": "always"}
    places = {"": "cpu", "0": "cpu", "1": "cpu", "2": "cpu"}
    models = [
        GPipe(copy.deepcopy(layers), [1, 2], **own),
        MappedGPipe(copy.deepcopy(layers), places, chunks=2, checkpoint="always"),
    ]
    for model in models:
        model.zero_grad()
        whole(model(x), x).backward()
        same_gradients(layers, model)
        model.zero_grad()
        with verify_recomputation():
            whole(model(x), x).backward()
        same_gradients(layers, model)
    model = models[0]
    model.zero_grad()
    training = ScheduledLoss(model, whole, "zbh1")
    training(x, x).backward()
    same_gradients(layers, model)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_between_partitions(layout):
    class Nested(nn.Module):
        def forward(self, x):
            return torch.nested.as_nested_tensor([row.view(2, 2) for row in x], layout=layout)

    class Flat(nn.Module):
        def forward(self, x):
            return torch.stack([row.flatten() for row in (x * x).unbind()])

    layers = nn.Sequential(nn.Linear(4, 4), Nested(), nn.Linear(2, 2), Flat())
    x = torch.rand(6, 4)
    plain(layers, x, 2).sum().backward()
    model = GPipe(copy.deepcopy(layers), [3, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    model.zero_grad()
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        pytest.fail(str(error))
    same_gradients(layers, model)
