"""Saving and loading: 0.0.7's keys, the plain module's, and those of any other balance."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from torchgpipe import GPipe


def layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


BALANCES = [[4], [1, 3], [2, 2], [3, 1], [1, 1, 1, 1]]


def wrapped(balance, seed=0):
    return GPipe(layers(seed), balance, devices=["cpu"] * len(balance))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.module.state_dict().values(), b.values()))


def test_keys():
    assert list(wrapped([1, 2, 1]).state_dict()) == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        "partitions.1.1.weight",
        "partitions.1.1.bias",
        "partitions.1.1.running_mean",
        "partitions.1.1.running_var",
        "partitions.1.1.num_batches_tracked",
        "partitions.2.3.weight",
        "partitions.2.3.bias",
    ]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", BALANCES)
@pytest.mark.parametrize("target", BALANCES)
def test_any_balance(source, target, assign):
    state = wrapped(source, seed=1).state_dict()
    keys = list(state)
    model = wrapped(target)
    assert model.load_state_dict(state, assign=assign) == ([], [])
    assert same(model, layers(seed=1).state_dict())
    assert list(state) == keys, "the state dict that was given is as it was"
    parents = [nn.ModuleDict({"body": x}) for x in (wrapped(source, seed=2), model)]
    assert parents[1].load_state_dict(parents[0].state_dict(), assign=assign) == ([], [])
    assert same(model, layers(seed=2).state_dict())


@pytest.mark.parametrize("own_first", [False, True])
def test_two_keys_of_one_tensor(own_first):
    """Two files were merged into one, for example: the model's own key counts."""
    plain, own = layers(seed=1).state_dict(), wrapped([1, 3], seed=2).state_dict()
    state = {**own, **plain} if own_first else {**plain, **own}
    model = wrapped([1, 3])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\"0\.weight\""):
        model.load_state_dict(state)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], list(plain))
    assert same(model, layers(seed=2).state_dict())


def test_layer_called_partitions():
    """The plain keys of such a layer look like those of a wrapper."""
    module = nn.Sequential()
    module.add_module("partitions", nn.Linear(1, 1))
    module.add_module("1", nn.Linear(1, 1))
    state = {key: torch.full_like(x, 7) for key, x in module.state_dict().items()}
    model = GPipe(module, [1, 1], devices=["cpu"] * 2)
    assert model.load_state_dict(state) == ([], [])
    assert model[0].weight.item() == 7
    state = {key: torch.full_like(x, 8) for key, x in model.state_dict().items()}
    assert model.load_state_dict(state) == ([], [])
    assert model[0].weight.item() == 8
    assert list(state) == [
        "partitions.0.partitions.weight",
        "partitions.0.partitions.bias",
        "partitions.1.1.weight",
        "partitions.1.1.bias",
    ]


def test_sequential_called_partitions():
    def module():
        return nn.Sequential(OrderedDict(partitions=nn.Sequential(nn.Linear(1, 1)), b=nn.ReLU()))

    model = GPipe(module(), [1, 1], devices=["cpu"] * 2)
    assert model.load_state_dict(module().state_dict()) == ([], [])
    assert model.load_state_dict(model.state_dict()) == ([], [])


def test_layer_called_partitions_with_layers_of_the_same_names():
    def module():
        inner = nn.ModuleDict({"left": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))})
        return nn.Sequential(OrderedDict([("partitions", inner), ("0", nn.Linear(1, 1))]))

    source = module()
    model = GPipe(module(), [1, 1], devices=["cpu"] * 2)
    assert model.load_state_dict(source.state_dict()) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters()))


def linears():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def test_keys_of_compiled_layers():
    """The wrapper that torch.compile makes is in the keys; what compiles in place is not."""
    compiled = nn.Sequential(*[torch.compile(layer, backend="eager") for layer in linears()])
    saved = GPipe(compiled, [1, 2], devices=["cpu"] * 2).state_dict()
    model = GPipe(linears(), [2, 1], devices=["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*partitions\.0\.0\._orig_mod\.weight"):
        model.load_state_dict(saved)
    model.load_state_dict({key.replace("._orig_mod.", "."): x for key, x in saved.items()})
    for one, other in zip(model.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one, other)

    in_place = linears()
    for layer in in_place:
        layer.compile(backend="eager")
    model = GPipe(in_place, [2, 1], devices=["cpu"] * 2)
    assert model.module.state_dict().keys() == linears().state_dict().keys()
    assert model.load_state_dict(linears().state_dict()) == ([], [])


@pytest.mark.parametrize("plain", [False, True])
def test_a_wrapper_twice_in_a_parent_and_one_within_another(plain):
    def parent(seed, balance):
        torch.manual_seed(seed)
        inner = [linears(), linears()]
        if balance:
            inner = [GPipe(x, balance, devices=["cpu"] * 2) for x in inner]
        outer = nn.Sequential(inner[1], nn.Linear(2, 2))
        if balance:
            outer = GPipe(outer, [1, 1], devices=["cpu"] * 2)
        return nn.ModuleDict({"one": inner[0], "other": inner[0], "outer": outer})

    source, target = parent(0, None if plain else [1, 2]), parent(1, [2, 1])
    assert target.load_state_dict(source.state_dict()) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), source.parameters()))
