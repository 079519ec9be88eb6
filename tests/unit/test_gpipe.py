"""The wrapper: its attributes, and its forward."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.support.helpers import linears
from torchgpipe import GPipe


@pytest.fixture
def model(device):
    return GPipe(linears(3, 4, 5, 2), [2, 1], devices=[device] * 2, chunks=2)


@pytest.fixture
def input(device):
    return torch.rand(5, 3, device=device)


# Attributes.


@pytest.mark.parametrize("name", ["balance", "devices"])
@pytest.mark.parametrize("value", [[1, 2], torch.tensor([1, 2]), None])
def test_attributes_that_wrapping_decides(model, name, value):
    before = getattr(model, name)
    with pytest.raises(AttributeError, match=rf"{name}: .*; wrap the same layers anew.* {name}="):
        setattr(model, name, value)
    # The list is the user's.
    getattr(model, name).clear()
    assert getattr(model, name) == before
    assert type(before) is list


def test_map_for_trainers(device):
    module = nn.Sequential(OrderedDict(first=nn.Linear(1, 1), second=nn.ReLU(), third=nn.ReLU()))
    model = GPipe(module, [2, 1], devices=["meta", device])
    assert model.hf_device_map == {
        "partitions.0.first": torch.device("meta"),
        "partitions.0.second": torch.device("meta"),
        "partitions.1.third": device,
    }
    # The names are those of the layers.
    assert all(model.get_submodule(name) is not None for name in model.hf_device_map)


def test_layers_by_index(device):
    module = linears(1, 2, 3, 4)
    first, second, third = module
    model = GPipe(module, [2, 1], devices=[device] * 2)
    assert len(model) == 3
    assert list(model) == [first, second, third]
    assert [model[0], model[2], model[-1], model[-3]] == [first, third, third, first]
    assert list(model[1:]) == [second, third]
    for index in (3, -4):
        with pytest.raises(IndexError):
            model[index]


def test_module_is_the_plain_module(device, input):
    torch.manual_seed(0)
    module = linears(3, 4, 2).to(device)
    keys, expected = list(module.state_dict()), module(input)
    model = GPipe(module, [1, 1], devices=[device] * 2)
    assert type(model.module) is nn.Sequential
    assert model.module is model.module
    assert list(model.module.state_dict()) == keys
    assert torch.equal(model.module(input), expected)
    assert set(model._modules) == {"partitions"}
    assert len(list(model.parameters())) == 4


class Scale(nn.Module):
    def forward(self, x, scale, *, offset=0):
        return x * scale + offset


def test_module_takes_the_arguments_of_the_wrapper(device, input):
    model = GPipe(nn.Sequential(Scale(), nn.Linear(3, 2)), [1, 1], devices=[device] * 2, chunks=2)
    expected = model(input, input, offset=1)
    assert torch.equal(model.module(input, input, offset=1), expected)
    assert torch.equal(model.module(x=input, scale=input, offset=1), expected)
    assert isinstance(model.module, nn.Sequential)
    assert list(model.module.state_dict()) == ["1.weight", "1.bias"]
    again = GPipe(model.module, [1, 1], devices=[device] * 2, chunks=2)
    assert torch.equal(again(input, input, offset=1), expected)
    for twin in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert torch.equal(twin(input, input, offset=1), expected)


def test_module_of_a_layer_without_a_signature():
    layer = nn.ReLU()
    layer.forward = min
    assert GPipe(nn.Sequential(layer), [1], devices=["cpu"]).module(2, 1) == 1


def test_module_follows_the_wrapper(model):
    module = model.module
    assert module.training
    assert model.eval() is model
    assert not module.training
    assert not model.module.training
    model.train()
    assert module.training
    module.eval()
    assert not model.module.training
    model.partitions[1]._modules["2"] = replaced = nn.Linear(5, 2)
    assert model.module[2] is replaced


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.cuda(),
        lambda m: m.cuda(0),
        lambda m: m.cpu(),
        lambda m: m.to("cpu"),
        lambda m: m.to(0),
        lambda m: m.to(torch.empty(1)),
    ],
)
def test_moving_is_denied(move, model, device):
    with pytest.raises(TypeError, match="must stay on their devices"):
        move(model)
    assert {(x.device, x.dtype) for x in model.parameters()} == {(device, torch.float32)}


# Forward.


def test_empty_module():
    model = GPipe(nn.Sequential(), [])
    x = torch.rand(2)
    assert model(x) is x
    assert (len(model), model.devices, list(model.module)) == (0, [], [])


class Count(nn.Module):
    runs = 0

    def forward(self, x):
        self.runs += 1
        return x.exp()


@pytest.mark.parametrize(
    ("checkpoint", "rows", "runs"),
    [("always", 5, 8), ("except_last", 5, 7), ("never", 5, 4)]
    # The last micro-batch that exists is spared, not the last of those asked for.
    + [("always", 3, 6), ("except_last", 3, 5), ("except_last", 1, 1), ("never", 3, 3)],
)
def test_what_is_recomputed(checkpoint, rows, runs):
    count = Count()
    model = GPipe(nn.Sequential(count), [1], chunks=4, checkpoint=checkpoint, devices=["cpu"])
    model(torch.rand(rows, 1, requires_grad=True)).sum().backward()
    assert count.runs == runs


def test_partition_that_is_replaced_is_what_runs():
    model = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=["cpu"] * 2)
    model.partitions[1] = nn.Sequential(nn.Threshold(2.0, 7.0))
    assert model(torch.ones(1)).tolist() == [7]
