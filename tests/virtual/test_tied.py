"""A weight that partitions on several devices share costs no time, whoever orders the cells."""

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_graphs, assert_no_races
from tests.support.size import some
from tests.virtual.stages import ONE_MODE, SEEDS, Stage, limit
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.testing import observe

N, M = 4, 8


def tied():
    torch.manual_seed(0)
    layers = nn.Sequential(*[Stage() for _ in range(N)])
    layers[-1].weight = layers[1].weight = layers[0].weight
    return layers


def squared(output, _):
    return output.square().mean()


def trained(step, device):
    """Train two steps, and return the state dict and the makespan of the second one."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.1)
    for _ in range(2):
        torch.manual_seed(1)
        with observe(jitter=SEEDS[0]) as seen:
            optimizer.zero_grad()
            step(torch.rand(M, 4, device="cpu").to(device)).backward()
            optimizer.step()
        assert_no_races(seen)
    return {key: x.cpu() for key, x in step.state_dict().items()}, seen.makespan


class Plain(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


class Piped(nn.Module):
    def __init__(self, model, loss=None):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x):
        if self.loss is None:
            return self.model(x).square().mean()
        return self.loss(x, torch.zeros(len(x), device=self.model.devices[-1]))

    def state_dict(self):
        return self.model.state_dict()


@pytest.mark.parametrize("schedule", [None, "1f1b", "zbh1"])
@pytest.mark.parametrize("mode", ONE_MODE)
def test_training_and_makespan(devices, schedule, mode):
    def wrapped(layers):
        model = GPipe(layers, [1] * N, devices=devices[:N], chunks=M, checkpoint=mode)
        return Piped(model, schedule and ScheduledLoss(model, squared, schedule))

    plain = Plain(*tied())
    expected, _ = trained(plain, "cpu")
    pipe = wrapped(tied())
    assert len([*pipe.parameters()]) == len([*plain.parameters()]) == N - 2
    found, makespan = trained(pipe, devices[0])
    torch.testing.assert_close([*found.values()], [*expected.values()])
    _, untied = trained(wrapped(nn.Sequential(*[Stage() for _ in range(N)])), devices[0])
    assert makespan == untied
    if schedule is None:
        assert makespan == limit(mode, N, M)


def linears():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(N)]
    layers[-1][0].weight = layers[1][0].weight = layers[0][0].weight
    return nn.Sequential(*layers)


@pytest.mark.parametrize("schedule", some(["fill_drain", "1f1b", "zbh1"], ["zbh1"]))
@pytest.mark.parametrize("mode", ONE_MODE)
def test_graphs(devices, schedule, mode):
    expected, _ = trained(Plain(*linears()), "cpu")
    model = GPipe(linears(), [1] * N, devices=devices[:N], chunks=M, checkpoint=mode)
    loss = ScheduledLoss(model, squared, schedule, stages="graph")
    found, _ = trained(Piped(model, loss), devices[0])
    torch.testing.assert_close([*found.values()], [*expected.values()])
    assert_graphs(loss)
