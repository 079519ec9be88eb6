"""Figures that depend on the rows."""

import pytest

from torchgpipe.planner.layers import Line, through
from torchgpipe.planner.record import Hop, Peaks, Record, Section, Sizes, Value


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


def record(size):
    section = Section("", True, kept=size, forward=2 * size, free=Peaks(*[size] * 4))
    value = Value(0, size, {1: size}, {Hop(0, 1, False)}, {1}, gradient=size, output=size)
    return Record([section], [value])


def figures(found):
    (section,), (x,) = found.sections, found.values
    assert section.forward == 2 * section.kept
    assert (x.hops, x.savers) == ({Hop(0, 1, False)}, {1})
    assert {section.kept, *section.free, x.size, x.users[1], x.gradient} == {x.output}
    return x.size


def test_a_curve_goes_through_its_points():
    sizes = Sizes({8: record(10.0), 2: record(4.0), 4: record(4.0)})
    assert [figures(sizes.at(x)) for x in (2, 3, 4, 6, 8)] == [4, 4, 4, 7, 10]


def test_a_curve_goes_on_as_it_ends():
    sizes = Sizes({2: record(1.0), 4: record(3.0), 8: record(9.0)})
    assert figures(sizes.at(16)) == 21
    assert figures(sizes.at(1)) == 0
    assert figures(Sizes({4: record(8.0)}).at(8)) == 16
