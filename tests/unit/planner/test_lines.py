"""Numbers that depend on the rows."""

import pytest

from torchgpipe.planner.lines import Curve, Line, through


@pytest.mark.parametrize(("constant", "slope"), [(0, 1), (3, 0), (2.5, 0.5)])
def test_two_points_give_the_line(constant, slope):
    line = Line(constant, slope)
    found = through((16, line.at(16)), (8, line.at(8)))
    assert found.at(100) == pytest.approx(line.at(100))


def test_noise_gives_no_negative_numbers():
    assert through((16, 1.0), (8, 2.0)).at(1) >= 0
    assert through((16, 10.0), (8, 1.0)).at(1) > 0


def test_one_point_is_in_proportion():
    assert through((4, 8.0)).at(1) == 2


def test_a_curve_goes_through_its_points():
    curve = Curve([(8, 10.0), (2, 4.0), (4, 4.0)])
    assert [curve.at(x) for x in (2, 3, 4, 6, 8)] == [4, 4, 4, 7, 10]


def test_a_curve_goes_on_as_it_ends():
    curve = Curve([(2, 1.0), (4, 3.0), (8, 9.0)])
    assert curve.at(16) == 21
    assert curve.at(1) == 0
    assert Curve([(4, 8.0)]).at(8) == 16
