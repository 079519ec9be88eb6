"""Operators are called by PyTorch's own functions, which give the same."""

import pytest
import torch
from torch import nn

from torchgpipe.graphs.slices import FUNCTIONS, METHODS, call_directly


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_are_there(name):
    assert type(getattr(torch, name)) is type(torch.mm)


def graph_with(target, *args, **kwargs):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x, *args), kwargs))
    call_directly(graph)
    return graph, torch.fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.ops.aten.sum.dim_IntList, ([0], True)),
        (torch.ops.aten.mul.Tensor, (0.5,)),
        (torch.ops.aten.view.default, ([6],)),
        (torch.ops.aten.native_layer_norm.default, ([3], None, None, 1e-5)),
    ],
)
def test_calls_give_the_same(target, args):
    x = torch.rand(2, 3)
    expected = target(x, *args)
    graph, module = graph_with(target, *args)
    assert target not in [node.target for node in graph.nodes]
    torch.testing.assert_close(module(x), expected)


def test_others_stay():
    graph, _ = graph_with(torch.ops.aten.add.Tensor, 1, alpha=2)
    assert torch.ops.aten.add.Tensor in [node.target for node in graph.nodes]
    assert METHODS.isdisjoint(FUNCTIONS)
