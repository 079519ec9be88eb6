"""Slices are functions of their own."""

import torch
from torch import nn

from tests.support.graphs import traced
from torchgpipe.graphs.joint import Effects
from torchgpipe.graphs.slices import crossing, function_of, graph_of, sliced, tidy


def halves_of_forward():
    layers = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    joint = tidy(traced(layers, torch.rand(3)).joint)
    return joint, *joint.forward


def test_inputs_and_outputs():
    joint, tanh, sigmoid = halves_of_forward()
    first, second = sliced([tanh], [tanh]), sliced([sigmoid], [sigmoid, None])
    assert first.inputs == joint.inputs
    assert second.inputs == [tanh]
    effects = Effects(joint.module.graph.nodes)
    assert crossing(effects, {tanh}, [sigmoid], [sigmoid]) == [tanh]
    x = torch.rand(3)
    (y,) = function_of(joint, first)([x])
    z, nothing = function_of(joint, second)([y])
    assert torch.equal(z, x.tanh().sigmoid())
    assert nothing is None


def test_graph_has_a_placeholder_for_each_input():
    _, _, sigmoid = halves_of_forward()
    graph = graph_of(sliced([sigmoid], [sigmoid]), {})
    assert [x.op for x in graph.nodes] == ["placeholder", "call_function", "output"]
