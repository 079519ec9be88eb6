"""The exhaustive search beside all settings, and its bounds beside what the planner simulates."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.simulate import exhaustive
from benchmarks.simulate.bounds import KEEPING, Bounds, Costs
from torchgpipe.partition.keeping import Offload
from torchgpipe.planner.layers import LayerCosts, Line
from torchgpipe.planner.problem import HOST, problem_of
from torchgpipe.planner.trial import Trials, settings

M = 4


@pytest.fixture(scope="module")
def trials():
    """Four layers of several sizes on two devices, whose copies and host take time."""
    wide = [nn.Sequential(nn.Linear(64, x), nn.ReLU(), nn.Linear(x, 64)) for x in (64, 512, 16, 96)]
    places = [torch.device("cpu")] * 2
    data = {"loss": F.mse_loss, "targets": (torch.rand(128, 64),), "timeout": 0}
    problem = problem_of(nn.Sequential(*wide), torch.rand(128, 64), places, 128, **data)
    pairs = [(0, 0), (1, 1), (0, 1), (1, 0)]
    links = {x: Line(0.02 * (x[0] != x[1]), 1e-6) for x in pairs}
    links |= {x: Line(0, 2e-6) for w in (0, 1) for x in ((w, HOST), (HOST, w))}
    # Times of their own, that are alike in each run.
    layers = [
        replace(x, **{name: Line(0, (k + 1) / 50) for name in ("forward", "input", "weight")})
        for k, x in zip((1, 4, 0, 2, 0), problem.layers)
    ]
    assert isinstance(layers[0], LayerCosts)
    return Trials(replace(problem, layers=layers, links=links))


def named(trials, names):
    return [x for x in settings(trials.problem, [M]) if x.name in names]


def ways(modes):
    """The modes for a trial: of what leaves, each way."""
    each = [(KEEPING[k],) if k < 3 else ("offload", Offload(ahead=2)) for k in modes]
    return product(*each)


def cuts_of(stages):
    return [(0, *x, 4) for x in combinations(range(1, 4), stages - 1)]


def test_bounds(trials):
    for setting in settings(trials.problem, [M]):
        bounds = Bounds(setting, Costs(trials, M, setting.splits))
        place, stages = setting.schedule.placement, bounds.stages
        every = [*product(range(4), repeat=stages)]
        for ends, modes in product(cuts_of(stages), every[:: 1 if stages == 2 else 23]):
            cut, given = np.array([ends]), np.array([modes])
            balance = tuple(b - a for a, b in pairwise(ends))
            found = [trials.trial(setting, balance, words) for words in ways(modes)]
            time = min(x.time for x in found)
            assert bounds.time(cut, given)[0] <= time * (1 + 1e-5)
            if not any(modes):
                assert bounds.time(cut, given)[0] == pytest.approx(time, rel=1e-5)
                for known in range(1, stages):
                    part = bounds.time(cut[:, : known + 1], given[:, :known])
                    assert part[0] <= time * (1 + 1e-5)
            for w in (0, 1):
                own = tuple(k for k, x in zip(modes, place) if x == w)
                least = min(x.memory[w] for x in found)
                assert bounds.memory(w, cut, own)[0] <= least * (1 + 1e-5)
                again, out = bounds.more(cut, {j: modes[j] for j in range(stages) if place[j] == w})
                assert bounds.loads(cut)[0, w] + again[0] <= time * (1 + 1e-5)
                assert out[0] <= time


@pytest.fixture(scope="module")
def every(trials):
    """All settings of two schedules."""
    return [
        trials.trial(x, tuple(b - a for a, b in pairwise(ends)), words)
        for x in named(trials, ["one_f_one_b", "zero_bubble_v"])
        for ends in cuts_of(len(x.schedule.placement))
        for modes in product(range(4), repeat=len(x.schedule.placement))
        for words in ways(modes)
    ]


@pytest.mark.parametrize("share", [1, 0.6, 0.2])
def test_finds_the_best(trials, every, share, monkeypatch):
    few = [*dict.fromkeys(x.setting for x in every)]
    monkeypatch.setattr(exhaustive, "settings", lambda *_: few)
    peaks = sorted(max(x.memory) for x in every)
    room = peaks[0] + share * (peaks[-1] - peaks[0])
    fastest = min(x.time for x in every if max(x.memory) <= room)
    found = exhaustive.exhausted(trials, [M], 1.5 * fastest, room)
    assert found.best is not None
    assert found.best.time == pytest.approx(fastest)
    assert max(found.best.memory) <= room
    assert found.settings == len(every)
    assert not found.unfinished
    assert found.simulated < len(every) / 2
    assert exhaustive.exhausted(trials, [M], 0.999 * fastest, room).best is None


def test_gives_up(trials, monkeypatch):
    monkeypatch.setattr(exhaustive, "MOST", 0)
    found = exhaustive.exhausted(trials, [M], float("inf"), float("inf"))
    assert found.best is None
    assert len(found.unfinished) == len([*settings(trials.problem, [M])])
