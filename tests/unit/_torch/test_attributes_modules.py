"""Modules and parameters are found in PyTorch's order."""

from torch import nn

from torchgpipe._torch.attributes import modules_of, parameters_of


def test_modules_in_order():
    shared = nn.Linear(1, 1)
    inner = nn.Sequential(nn.ReLU(), shared, nn.Sequential(nn.Tanh()))
    model = nn.Sequential(inner, nn.Dropout(), shared, nn.ModuleDict({"a": inner, "b": nn.GELU()}))
    model.register_module("none", None)
    assert modules_of(model) == [*model.modules()]


def test_parameters_in_order():
    tied = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    other.weight, other.bias = tied.weight, None
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(tied, nn.ReLU()), other)
    found = parameters_of(modules_of(model))
    assert [*map(id, found)] == [*map(id, model.parameters())]
