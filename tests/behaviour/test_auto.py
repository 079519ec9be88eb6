"""A model that is wrapped with "auto" trains as the plain one does."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.planner import auto as choice
from torchgpipe.planner.problem import Problem


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(choice, "Problem", partial(Problem, timeout=0))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_gradients(checkpoint):
    layers = nn.Sequential()
    for _ in range(6):
        layers.append(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    plain = copy.deepcopy(layers)
    x, y = torch.rand(32, 16), torch.rand(32, 16)
    options = {"devices": ["cpu"] * 3, "chunks": 4, "checkpoint": checkpoint}
    model = GPipe(layers, "auto", sample=x, **options)
    for wrapped in (model, ScheduledLoss(model, nn.functional.mse_loss)):
        model.zero_grad()
        if wrapped is model:
            nn.functional.mse_loss(model(x), y).backward()
        else:
            wrapped(x, y).backward()
        plain.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        for own, other in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


def test_settings_may_be_changed_and_saved():
    model = GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        "auto",
        sample=torch.rand(8, 4),
        devices=["cpu"] * 2,
        chunks=2,
    )
    twin = copy.deepcopy(model)
    twin.chunks, twin.checkpoint = 4, ["always", "never"]
    assert twin.balance == model.balance == [1, 1]
    other = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [2], devices=["cpu"])
    other.load_state_dict(model.state_dict())
    x = torch.rand(8, 4)
    torch.testing.assert_close(twin(x), other(x))
