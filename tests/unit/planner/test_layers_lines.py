"""Costs in between the sizes that were measured, and beyond."""

from torchgpipe.planner.layers import Layer, Line, Taken, Weights, through


def test_line():
    assert through((2, 3.0), (1, 2.0)) == Line(1.0, 1.0)
    # With one point, and where noise makes few rows slower, all is in proportion to the rows.
    assert through((4, 2.0)) == Line(0.0, 0.5)
    assert through((2, 3.0), (1, 1.0)) == Line(0.0, 1.5)


def test_memory_between_two_sizes():
    few, many = (Taken(own=x, stashed=((7, x, 0.0),), popped=((3, x),)) for x in (10.0, 30.0))
    layer = Layer("", *[Line()] * 5, Weights(), {2: few, 4: many})
    assert layer.taken(3) == Taken(own=20.0, stashed=((7, 20.0, 0.0),), popped=((3, 20.0),))
    assert layer.taken(5).own == 40
    one = Layer("", *[Line()] * 5, Weights(), {4: many})
    assert one.taken(2) == Taken(own=15.0, stashed=((7, 15.0, 0.0),), popped=((3, 15.0),))
