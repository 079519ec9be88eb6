"""The problem of a plan: devices that are slower than others."""

import torch

from torchgpipe.planner import problem


def test_slowness(monkeypatch):
    places = [torch.device("meta", k) for k in range(4)]
    monkeypatch.setattr(problem, "model_of", lambda x: "new" if x.index < 2 else "old")
    times = {0: 2.0, 2: 5.0}
    assert problem.slowness_of(places, lambda x: times[x.index]) == [1, 1, 2.5, 2.5]
    times[2] = 2.05
    assert problem.slowness_of(places, lambda x: times[x.index]) == [1, 1, 1, 1]
    monkeypatch.setattr(problem, "model_of", lambda x: "same")
    assert problem.slowness_of(places, lambda x: 1 / 0) == [1, 1, 1, 1]
