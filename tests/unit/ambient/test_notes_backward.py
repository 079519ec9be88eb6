"""Visits of the graph that layers make."""

from torch import nn

from torchgpipe.ambient.notes import Visit, is_worth_a_visit


def test_nothing_is_learned_without_a_graph():
    layers = nn.Sequential(nn.ReLU())
    with Visit(layers, [], list, "note"):
        pass
    assert is_worth_a_visit(layers)
