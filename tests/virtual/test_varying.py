"""The benchmark of stages whose times vary, and the critical path that it measures against."""

import json
import random
import time

import pytest

from benchmarks.rivals.library import Library
from benchmarks.simulate.blocking import KINDS, Blocks, draw
from benchmarks.simulate.critical import backward_path, forward_path, recomputed, step_path
from benchmarks.suites import varying
from tests.support.helpers import MODES
from tests.support.size import some
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("prompt")


def rows(m, *times):
    return [list(times)] * m


def test_path_of_equal_times():
    m, n, time = 8, 4, 3
    assert forward_path(rows(m, *[time] * n)) == (m + n - 1) * time
    assert backward_path(rows(m, *[time] * n)) == (m + n - 1) * time


@pytest.mark.parametrize("ahead", [False, True])
def test_path_of_equal_recomputations(ahead):
    m, n = 8, 4
    path = backward_path(rows(m, *[2] * n), rows(m, *[1] * n), ahead=ahead)
    # The first of a partition waits for the gradient, unless it has been recomputed by then.
    assert path == m * 3 + (n - 1) * (2 if ahead else 3)


def test_path_around_slow_cells():
    # Of each pass, the two slow cells are in different micro-batches and partitions.
    slow = [[1, 9], [9, 1]]
    assert forward_path(slow) == 1 + 9 + 1
    assert backward_path(slow) == 1 + 9 + 1
    slow = [[9, 1], [1, 9]]
    assert forward_path(slow) == 9 + 1 + 9
    assert backward_path(slow) == 9 + 1 + 9


@pytest.mark.parametrize("mode", MODES)
def test_path_is_the_ideal_makespan(mode):
    m, forward, backward = 5, [3, 1, 4, 2], [2, 7, 1, 8]
    path = varying.paths(mode, rows(m, *forward), rows(m, *backward))["ahead"]
    assert path == step_path(mode, m, forward, forward, backward)


def test_draw():
    numbers = random.Random(0)
    drawn = {kind: sum(draw(kind, 2.0, 100, 50, numbers), []) for kind in KINDS}
    for times in drawn.values():
        assert sum(times) / len(times) == pytest.approx(2.0, rel=0.1)
    assert {*drawn["constant"]} == {2.0}
    assert 1 <= min(drawn["uniform"]) < max(drawn["uniform"]) <= 3
    assert min(drawn["exponential"]) < 0.1
    assert max(drawn["exponential"]) > 8


@pytest.mark.parametrize("mode", MODES)
def test_each_cell_blocks_for_its_time(devices, mode, monkeypatch):
    m, n = 3, 2
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    forward, backward = ([[k + 10 * i + j for j in range(n)] for i in range(m)] for k in (100, 200))
    blocks = Blocks(Library(GPipe, devices), mode, forward, backward)
    slept.clear()
    blocks.seconds()
    again = sum(forward[: recomputed(mode, m)], [])
    assert sorted(filter(None, slept)) == sorted([*sum(forward + backward, []), *again])


@pytest.mark.parametrize("mode", some(MODES, ["except_last"]))
def test_passes_take_their_paths_at_least(devices, mode):
    times = varying.drawn("uniform", 4, 3, seed=0, mean=0.001)
    seconds = Blocks(Library(GPipe, devices), mode, *times).seconds()
    assert min(varying.ratios(varying.paths(mode, *times), *seconds).values()) >= 1


def test_command(tmp_path, capsys):
    output = tmp_path / "varying.json"
    few = ["--mean=0.004", "--seeds=2", "--m=2", "--n=2", "--kinds=uniform", f"--output={output}"]
    varying.main([*few, "--modes", "never", "always", "--rivals", "ours"])
    lines = [line.strip("| ").split()[:10:2] for line in capsys.readouterr().out.splitlines()]
    for mode in ("never", "always"):
        assert lines.count(["2", "2", "uniform", mode, "ours"]) == 1
    result = json.loads(output.read_text())
    assert [(row["mode"], row["seed"]) for row in result["rows"]] == [
        *[("never", 0), ("never", 1)],
        *[("always", 0), ("always", 1)],
    ]
    assert not result["left_out"]
