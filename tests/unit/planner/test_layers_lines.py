"""Costs in between the sizes that were measured, and beyond."""

from torchgpipe.planner.layers import Layer, Line, Weights, through


def test_line():
    assert through((2, 3.0), (1, 2.0)) == Line(1.0, 1.0)
    # With one point, and where noise makes few rows slower, all is in proportion to the rows.
    assert through((4, 2.0)) == Line(0.0, 0.5)
    assert through((2, 3.0), (1, 1.0)) == Line(0.0, 1.5)


def test_a_layer_between_two_sizes():
    layer = Layer("", Weights(), {7: Line(0.0, 1.0)}, [3], [Line(1.0, 2.0)] * 14)
    assert {*layer.at(3)} == {7.0}
    assert layer.time(3) == 14
