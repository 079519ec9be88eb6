"""The state of an optimizer goes by the order of parameters, which is that of the layers."""

import pytest
import torch
from torch import nn

from torchgpipe import GPipe

BALANCES = [None, [5], [2, 3], [1, 2, 2]]


def model_of(balance, seed=0):
    """A model with a shared weight, a frozen one and a buffer; plain if the balance is None."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3), nn.Linear(3, 3)
    )
    layers[3].weight = layers[0].weight
    layers[4].bias.requires_grad_(False)
    return GPipe(layers, balance, devices=["cpu"] * len(balance)) if balance else layers


def everything(model):
    return model.parameters()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def by_dimension(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.1},
    ]


def by_layer(model):
    return [
        {"params": layer.parameters(), "lr": 0.1 / (k + 1)}
        for k, layer in enumerate([model[1], model[0], model[4]])
    ]


def named(model):
    return (model.module if isinstance(model, GPipe) else model).named_parameters()


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
    ],
    ids=["AdamW", "SGD", "Adafactor"],
)
@pytest.mark.parametrize("groups", [everything, trainable, by_dimension, by_layer, named])
@pytest.mark.parametrize("source", [None, [2, 3]], ids=str)
def test_carried_to_any_balance(source, groups, make, tmp_path):
    model = model_of(source)
    optimizer = make(groups(model))
    for seed in range(2):
        step(model, optimizer, seed)
    weights = (model.module if source else model).state_dict()
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    step(model, optimizer, 2)
    for target in BALANCES:
        saved = torch.load(tmp_path / "x.pt")
        other = model_of(target, seed=1)
        its_optimizer = make(groups(other))
        other.load_state_dict(saved["model"])
        its_optimizer.load_state_dict(saved["optimizer"])
        step(other, its_optimizer, 2)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
        state, its_state = optimizer.state_dict(), its_optimizer.state_dict()
        assert state["param_groups"] == its_state["param_groups"]
        assert state["state"].keys() == its_state["state"].keys()


def test_names_of_a_balance():
    """Names are for people: loading goes by the order all the same."""
    one, other = model_of([2, 3]), model_of([1, 2, 2], seed=1)
    optimizer = torch.optim.AdamW(one.named_parameters())
    step(one, optimizer, 0)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"][-1] == "partitions.1.4.bias"
    its_optimizer = torch.optim.AdamW(other.named_parameters())
    its_optimizer.load_state_dict(state)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state.get(p, {}).items():
            assert torch.equal(value, its_optimizer.state[q][key])
