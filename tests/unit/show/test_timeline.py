"""Timelines: their steps, what they print, and their files."""

import json
from dataclasses import replace

import pytest

from tests.unit.show.cases import step
from torchgpipe.schedule import Costs, one_f_one_b, simulate
from torchgpipe.show.timeline import Timeline


def two_steps():
    later = [replace(x, start=x.start + 20, end=x.end + 20, step=1) for x in step()]
    return Timeline([*step(), *later], advice="Do less.")


def test_steps_begin_at_zero():
    timeline = two_steps()
    assert timeline.makespan == 28
    assert timeline.steps == [0, 1]
    for number in (0, 1, -1):
        found = timeline.step(number)
        assert [(x.start, x.end) for x in found.spans] == [(x.start, x.end) for x in step()]
    with pytest.raises(IndexError, match=r"number: 2, steps: 2"):
        timeline.step(2)


def test_print():
    text = str(two_steps())
    assert text.startswith("step of 8 ms, the last of 2\n\ntime")
    assert text.endswith("\n\nDo less.")
    assert "busy  recompute  bubble" in text


def test_nothing_was_traced():
    assert "call the model" in str(Timeline([]))
    assert Timeline([]).makespan == 0
    assert Timeline([]).shares == []


def test_nothing_took_any_time():
    spans = [replace(x, start=1.0, end=1.0) for x in step()]
    assert "observe(costs=" in str(Timeline(spans))


def test_files(tmp_path):
    timeline = two_steps()
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([x for x in events if x["ph"] == "X"]) == len(timeline.spans)
    assert {x["args"].get("micro-batch") for x in events if x["ph"] == "X"} == {0, 1}
    timeline.svg(tmp_path / "one.svg")
    timeline.svg(tmp_path / "both.svg", simulate(one_f_one_b(2, 2)).timeline)
    one, both = ((tmp_path / x).read_text() for x in ("one.svg", "both.svg"))
    assert "worker 1" in both
    assert "worker 1" not in one


def test_simulated():
    costs = Costs(F=2, copy={(0, 1): 0.5, (1, 0): 0.25})
    report = simulate(one_f_one_b(2, 3), costs)
    timeline = report.timeline
    assert timeline.makespan == report.makespan
    cells = {x.name: (x.start, x.end) for x in timeline.spans if x.computes}
    assert cells == {str(op): (x, report.end[op]) for op, x in report.start.items()}
    copies = [x for x in timeline.spans if x.kind == "copy"]
    assert len(copies) == 6
    assert {(x.stage, x.target, x.time) for x in copies} == {(0, 1, 0.5), (1, 0, 0.25)}
    assert all(x.start == cells[f"{x.stage}{'FB'[x.stage]}{x.microbatch}"][1] for x in copies)


def test_title(tmp_path):
    first, second = Timeline(step(), title="before"), Timeline(step(), title="after")
    first.svg(tmp_path / "both.svg", second)
    text = (tmp_path / "both.svg").read_text("utf-8")
    assert 0 < text.index(">before<") < text.index(">after<")
