"""Nodes that compute nothing are left out."""

import torch
from torch import nn

from tests.support.graphs import traced
from torchgpipe.graphs.slices import tidy


def names(joint):
    return [str(x.target).removeprefix("aten.") for x in joint.calls]


def test_transpositions_and_what_nobody_needs():
    class Layer(nn.Module):
        def forward(self, x):
            x.sin()
            return x.t().t().view(x.shape) * 2

    joint = tidy(traced(Layer(), torch.rand(2, 4)).joint)
    assert names(joint) == ["mul.Tensor"]


def test_references_behind_a_change_stay():
    """Otherwise whoever takes one takes a node of before the change, and leaves that out."""

    class Layer(nn.Module):
        def forward(self, x):
            y = x * 2
            y[0] = 0
            return y.t().t().sin() * y.detach().cos()

    joint = tidy(traced(Layer(), torch.rand(2, 4, requires_grad=True)).joint)
    (sin,) = [x for x in joint.forward if "sin" in x.name]
    (mul,) = [x for x in joint.forward if x.name == "mul"]
    assert sin.args[0] is not mul
