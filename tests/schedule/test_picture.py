"""The pictures: in characters, and as SVG."""

from xml.etree import ElementTree

import pytest
from hypothesis import given

from tests.schedule.cases import BUILT_IN, examples, schedules
from torchgpipe.schedule import Costs, Schedule, one_f_one_b, parse, simulate

SVG = "{http://www.w3.org/2000/svg}"


def test_characters():
    assert (
        str(one_f_one_b(2, 3).split())
        == """\
time      0                   5                   10
worker 0  0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 .   0I2 0W2
worker 1  .   1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 ."""
    )
    assert (
        str(parse("0F0 0F10 0R0 0B0 (0F1;0B10)", [0], 11))
        == """\
time      0                        5
worker 0  0F0  0F10 0R0  0B0------ (0F1;0B10)----"""
    )


def test_instructions_that_never_begin_are_named():
    assert (
        str(parse("0F0 0B0 0F1\n1F0 1F1 1B0", [0, 1], 2))
        == """\
time      0
worker 0  0F0 .
worker 1  .   1F0
worker 0 never comes to 0B0
worker 1 never comes to 1F1"""
    )


@pytest.mark.parametrize("text", ["0B0 0F0", "0F0 0F0", "7F9", ""])
def test_faults_can_be_drawn(text, tmp_path):
    lines = tuple(parse(text, [0], 1).program) if text else ((),)
    schedule = Schedule((0,), 1, lines)
    assert str(schedule).splitlines()[1].startswith("worker 0")
    schedule.svg(tmp_path / "schedule.svg")
    ElementTree.parse(tmp_path / "schedule.svg")


def bars(path):
    """Return tooltip -> x, y, width, height and color of each bar."""
    found = {}
    for rect in ElementTree.parse(path).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            place = [float(rect.get(x)) for x in ("x", "y", "width", "height")]
            found.setdefault(title.text, []).append((*place, rect.get("fill")))
    return found


def test_svg(tmp_path):
    schedule = parse("0F0 0F1 0I0 0W0 0B1\n1F0 1R0 (2F0;1F1) 2F1 2B1 1B1 2B0 1B0", [0, 1, 1], 2)
    costs = Costs(F=2, I=[1, 2, 1], copy=0.5)
    report = simulate(schedule, costs)
    report.svg(tmp_path / "report.svg")
    found = bars(tmp_path / "report.svg")
    assert len(found) == sum(len(line) for line in schedule.program)
    (first,) = found["0F0 from 0 to 2"]
    scale = first[2] / 2
    for op, begin in report.start.items():
        both = [x for x in found if str(op) in x.split()[0].strip("()").split(";")]
        (tip,) = both
        places = found[tip]
        end = report.end[op]
        assert tip.endswith(f" from {float(begin):g} to {float(end):g}")
        for x, y, width, height, _ in places:
            assert x - first[0] == pytest.approx(float(begin) * scale, abs=1)
            assert width == pytest.approx(float(end - begin) * scale, abs=1)
            assert (y > first[1] + 20) == (op.stage > 0)
            assert height == first[3] / len(places)
    top, bottom = found[next(x for x in found if ";" in x)]
    assert bottom[1] == top[1] + top[3]
    # The later stage of a worker is lighter.
    assert found["1F0 from 2.5 to 4.5"][0][4] == first[4] != top[4]
    words = [x.text for x in ElementTree.parse(tmp_path / "report.svg").iter(f"{SVG}text")]
    assert {"worker 0", "worker 1", "F forward", "R recompute"} <= {*words}
    assert "lighter: later stages of a worker" in words
    assert f"{float(report.makespan):g}" in words


@examples
@given(schedules())
def test_anything_can_be_drawn(tmp_path_factory, case):
    schedule, costs = case
    path = tmp_path_factory.mktemp("svg") / "schedule.svg"
    schedule.svg(path)
    assert sum(map(len, bars(path).values())) == len(simulate(schedule).start)
    simulate(schedule, costs).svg(path)
    ElementTree.parse(path)
    rows = str(schedule).splitlines()
    assert len(rows) == len(schedule.program) + 1
    for row, line in zip(rows[1:], schedule.program):
        assert [x.rstrip("-") for x in row.split()[2:] if x != "."] == [str(x) for x in line]


@pytest.mark.parametrize("name", BUILT_IN)
def test_time_is_the_column(name):
    schedule = BUILT_IN[name](3, 6)
    report = simulate(schedule)
    head, *rows = str(schedule).splitlines()
    unit = (head.index("5") - head.index("0")) // 5
    margin = head.index("0")
    for op, begin in report.start.items():
        row = rows[schedule.placement[op.stage]]
        column = margin + int(begin) * unit
        assert str(op) in row[column : column + 3 * unit]
