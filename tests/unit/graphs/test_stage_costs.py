"""Costs of stages are counted without running them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.schedules import Case, training_of
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.schedule import simulate, validate


class Never(nn.Module):
    """A layer that only a tracer may run."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        assert type(x) is not torch.Tensor
        return self.layer(x)


def test_costs():
    torch.manual_seed(0)
    layers = [Never(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), Never(), Never()]
    case = Case(layers, torch.rand(8, 6), torch.rand(8, 6))
    training = training_of(case, layers, "zbh1", ["cpu"] * 4, "never", stages="graph")
    costs = training.costs(case.input, case.target)
    row = 2 * 6 * 4
    # The last stage keeps its input, its output and the target.
    assert costs.activation == [row, 2 * row, row, 3 * row]
    assert costs.checkpoint == [row, row, row, 2 * row]
    assert costs.I[0] == 0 < costs.I[2] < costs.I[1]
    # The output of the last layer need not be computed again.
    assert costs.F[1] == 2 * costs.R[1] == 2 * costs.F[0] > costs.R[0] == 0
    schedule = training._plan(4, forward=False).schedule
    assert simulate(schedule, costs).makespan > 0
    assert validate(schedule, capacity=1, costs=costs)
    # Nothing was left of it.
    assert all(x.grad is None for x in training.parameters())


def test_eager_stages_have_no_costs():
    model = GPipe(nn.Sequential(nn.Linear(6, 6)), [1], devices=["cpu"])
    x = torch.rand(2, 6)
    with pytest.raises(ValueError, match="stages='graph'"):
        ScheduledLoss(model, F.mse_loss).costs(x, x)

    class Value(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = GPipe(nn.Sequential(Value()), [1], devices=["cpu"])
    training = ScheduledLoss(model, F.mse_loss, stages="graph")
    with pytest.warns(UserWarning, match="stage 0 is not"), pytest.raises(ValueError, match="0"):
        training.costs(x, x)
