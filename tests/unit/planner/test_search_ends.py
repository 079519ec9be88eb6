"""Other cuts to begin with, whose ends are shorter or longer."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe.planner import search as choice
from torchgpipe.planner.layers import Line
from torchgpipe.planner.problem import problem_of


def test_shorter_ends(monkeypatch):
    """Eighteen layers on four devices, of which a third takes four times as long as the others."""
    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(18)])
    data = {"loss": F.mse_loss, "targets": (torch.rand(8, 2),), "timeout": 0}
    problem = problem_of(layers, torch.rand(8, 2), [torch.device("cpu")] * 4, 8, **data)
    costs = [
        replace(x, adding=Line(), forward=y, input=y, weight=y, late=y)
        for x, y in zip(problem.layers, [Line(0, time) for time in [*[4, 1, 1] * 6, 0]])
    ]
    problem = replace(problem, layers=costs, links={})
    best = choice.search(problem, [8])[0]
    assert best.setting.name == "interleaved_zero_bubble"
    assert best.balance == (1, 2, 2, 4, 3, 3, 1, 2)
    assert best.time == 253
    monkeypatch.setattr(choice, "ENDS", ())
    assert choice.search(problem, [8])[0].time == 258
