"""Operators with a mask become two, where that pays."""

import torch
from torch import nn

from tests.support.graphs import Stage, traced
from torchgpipe.graphs.slices import split_masks, tidy


def targets(nodes):
    return [str(x.target) for x in nodes]


def test_convolution_becomes_two():
    found = traced(nn.Conv2d(2, 2, 3), torch.rand(1, 2, 5, 5, requires_grad=True))
    joint = split_masks(tidy(found.joint))
    both = [x for x in joint.calls if "convolution_backward" in str(x.target)]
    masks = [x.args[-1] for x in both]
    assert masks == [[True, False, False], [False, True, True]]
    assert set(both) <= joint.backward


def test_convolution_is_one_where_the_backward_is():
    """B computes both kinds of gradients by one operator, with all bits of autograd's."""
    layers = nn.Conv2d(2, 2, 3)
    x = torch.rand(1, 2, 5, 5, requires_grad=True)
    stage = Stage(layers, x)
    graph = stage.parts.backward.function.__self__.graph
    (one,) = [x for x in graph.nodes if "convolution_backward" in str(x.target)]
    assert one.args[-1] == [True, True, True]
    (output,), saved = stage.forward()
    found = [x for some in stage.backward(saved, [torch.ones_like(output)]) for x in some]
    expected = torch.autograd.grad(layers(x).sum(), [x, *layers.parameters()])
    assert all(map(torch.equal, found, expected))


def test_convolution_without_a_gradient_of_its_input_stays_one():
    found = traced(nn.Conv2d(2, 2, 3), torch.rand(1, 2, 5, 5))
    joint = split_masks(tidy(found.joint))
    assert sum("convolution_backward" in x for x in targets(joint.calls)) == 1


def test_norm_stays_whole():
    """Gradients of its weights are in I: they are small, and W would have to keep its input."""
    stage = Stage(nn.LayerNorm(4), torch.rand(3, 4, requires_grad=True))
    assert stage.parts.weight.slice.nodes == []
    assert any("native_layer_norm_backward" in x for x in targets(stage.parts.input.slice.nodes))
