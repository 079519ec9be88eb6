"""Modes that cannot be better are not tried, and what is found is the same."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.size import soak
from torchgpipe.planner import search as choice
from torchgpipe.planner.layers import Line
from torchgpipe.planner.problem import HOST, problem_of


@pytest.fixture(scope="module")
def problem():
    """Sixteen layers on two devices, of which every second one takes four times as long."""
    layers = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(8, 8), nn.Tanh())])
    x = torch.rand(512, 8)
    data = {"loss": F.mse_loss, "targets": (x,), "timeout": 0}
    found = problem_of(layers, x, [torch.device("cpu")] * 2, 8, **data)
    times = [Line(0, time) for time in [*[4, 1] * 8, 0]]
    layers = [replace(x, forward=y, input=y, weight=y, late=y) for x, y in zip(found.layers, times)]
    links = {way: Line(0.002) for w in range(2) for way in ((w, HOST), (HOST, w))}
    return replace(found, layers=layers, links=links, memory=[inf] * 2)


def trials(problem, share):
    """The fastest trial of each schedule, with all computed again, under a part of its memory."""
    for first in choice.search(problem, [8]):
        search = choice.Search(replace(problem, memory=[share * max(first.memory)] * 2))
        yield search, search.trial(first.setting, first.balance, ("always",) * len(first.modes))


def one_by_one(search, trial):
    """Try all modes of each partition, and keep the best one."""
    sending = [
        ["offload"] if search._sent(trial, j) is not None else [] for j in range(len(trial.modes))
    ]
    for j, modes in enumerate(sending):
        for mode in ("never", *modes, "except_last"):
            if trial.modes[j] != "never":
                more = (*trial.modes[:j], mode, *trial.modes[j + 1 :])
                more = search.trial(trial.setting, trial.balance, more)
                trial = more if more.beats(trial) else trial
    return trial


@soak
def test_all_modes(problem):
    found = set()
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
        for search, trial in trials(problem, share):
            if trial.fits:
                best = search.keeping_more(trial)
                assert best.modes == one_by_one(search, trial).modes
                found |= {*best.modes}
    assert {"never", "always", "offload"} <= found
