"""Modules are found in PyTorch's order."""

from torch import nn

from torchgpipe._torch.modules import modules_of


def test_modules_in_order():
    shared = nn.Linear(1, 1)
    inner = nn.Sequential(nn.ReLU(), shared, nn.Sequential(nn.Tanh()))
    model = nn.Sequential(inner, nn.Dropout(), shared, nn.ModuleDict({"a": inner, "b": nn.GELU()}))
    model.register_module("none", None)
    assert modules_of(model) == [*model.modules()]
