"""The picture of a simulated schedule."""

from xml.etree import ElementTree

import pytest
from hypothesis import given

from tests.schedule.cases import examples, schedules
from torchgpipe.schedule import Costs, parse, simulate

SVG = "{http://www.w3.org/2000/svg}"


def bars(path):
    """Return tooltip -> x, y, width, height and color of each bar of a computation."""
    found = {}
    for rect in ElementTree.parse(path).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and " to " not in title.text.partition(" from ")[0]:
            place = [float(rect.get(x)) for x in ("x", "y", "width", "height")]
            found[title.text.split()[0]] = (*place, rect.get("fill"), title.text)
    return found


def test_svg(tmp_path):
    schedule = parse("0F0 0F1 0I0 0W0 0B1\n1F0 1R0 (2F0;1F1) 2F1 2B1 1B1 2B0 1B0", [0, 1, 1], 2)
    costs = Costs(F=2, I=[1, 2, 1], copy=0.5)
    report = simulate(schedule, costs)
    report.timeline.svg(tmp_path / "report.svg")
    found = bars(tmp_path / "report.svg")
    first = found["0F0"]
    scale = first[2] / 2
    assert len(found) == len(report.start)
    for op, begin in report.start.items():
        x, y, width, height, _, tip = found[str(op)]
        end = report.end[op]
        assert tip == f"{op} from {float(begin):g} to {float(end):g}"
        assert x - first[0] == pytest.approx(float(begin) * scale, abs=1)
        assert width == pytest.approx(float(end - begin) * scale, abs=1)
        assert (y > first[1] + 20) == (op.stage > 0)
        assert height == first[3] / (2 if str(op) in ("2F0", "1F1") else 1)
    top, bottom = found["2F0"], found["1F1"]
    assert bottom[1] == top[1] + top[3]
    # The later stage of a worker is lighter.
    assert found["1F0"][4] == first[4] != top[4]
    words = [x.text for x in ElementTree.parse(tmp_path / "report.svg").iter(f"{SVG}text")]
    assert {"worker 0", "worker 1", "F forward", "R recompute"} <= {*words}
    assert "lighter: later stages of a worker" in words
    assert f"{float(report.makespan):g}" in words


@examples
@given(schedules())
def test_anything_can_be_drawn(tmp_path_factory, case):
    report = simulate(*case)
    path = tmp_path_factory.mktemp("svg") / "schedule.svg"
    report.timeline.svg(path)
    took_time = {str(op) for op, begin in report.start.items() if report.end[op] > begin}
    assert bars(path).keys() == took_time
    assert len(str(report.timeline).split("\n\n")[1].splitlines()) == len(case[0].program) + 1
