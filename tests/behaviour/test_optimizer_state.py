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


@pytest.mark.parametrize("source", BALANCES)
def test_order_of_parameters(source):
    """States, and groups of any choice, go by it: it is that of the layers, for any balance."""
    model = model_of(source)
    plain = model.module if source else model
    expected = [id(x) for x in plain.parameters()]
    assert [id(x) for x in model.parameters()] == expected
    layers = [x for k in range(5) for x in model[k].parameters()]
    assert [*dict.fromkeys(map(id, layers))] == expected


def step(model, optimizer):
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()


def test_names_of_a_balance():
    """Names are for people: loading goes by the order all the same."""
    one, other = model_of([2, 3]), model_of([1, 2, 2], seed=1)
    optimizer = torch.optim.AdamW(one.named_parameters())
    step(one, optimizer)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"][-1] == "partitions.1.4.bias"
    its_optimizer = torch.optim.AdamW(other.named_parameters())
    its_optimizer.load_state_dict(state)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state.get(p, {}).items():
            assert torch.equal(value, its_optimizer.state[q][key])
