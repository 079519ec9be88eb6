"""Modules of a device map as a balance, and other balances as maps."""

import torch
from torch import nn

from torchgpipe.mapped.device_map import Mapped
from torchgpipe.planner.replays import Modules

CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS = [nn.Linear(2, 2) for _ in range(6)]
NAMES = ["embed", *(f"layers.{k}" for k in range(4)), "head"]


def modules(places):
    found = [Mapped(x, x, *more, "") for x, *more in zip(NAMES, LAYERS, places)]
    return Modules({"": CPU, "layers": CPU, **dict(zip(NAMES, places))}, found)


def test_other_cuts():
    found = modules([CPU] * 4 + [META] * 2)
    assert found.balance == (4, 2)
    moved = found.map([3, 3])
    before = {"": CPU, "layers": CPU, **dict.fromkeys(NAMES[:3], CPU)}
    assert moved == {**before, **dict.fromkeys(NAMES[3:], META)}
    assert found.words([3, 3]) == "with layers.2 on meta, the step"
    assert found.words([5, 1]) == "with layers.3 on cpu, the step"
    # A sentence names few modules.
    assert found.words([1, 5]) == "with layers.0, layers.1, layers.2 on meta, the step"
    most = modules([CPU] * 6)
    assert most.balance == (6,)
    found = modules([CPU] * 5 + [META])
    assert found.words([0, 6]) == "with embed to layers.3 on meta, the step"


def test_ties_stay_together(monkeypatch):
    monkeypatch.setattr(LAYERS[3], "weight", LAYERS[4].weight)
    found = modules([CPU] * 5 + [META])
    assert found.allows([5, 1])
    assert not found.allows([4, 2])
    assert found.allows([3, 3])


def test_models_that_come_back():
    found = modules([CPU] * 2 + [META] * 3 + [CPU])
    assert found.balance == ()
    assert found.devices == []
