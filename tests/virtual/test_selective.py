"""Cells whose recomputations compute again what a policy of PyTorch's does not keep."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import wrap
from tests.virtual.test_selective_offload import M, of_gpipe, of_map, of_schedule, trained

aten = torch.ops.aten


def dear(context, op, *args, **kwargs):
    """Keep products of matrices."""
    kept = op in (aten.addmm.default, aten.mm.default, aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy):
    return partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("make", [of_gpipe, of_schedule, of_map])
def test_what_a_policy_keeps_is_not_computed_again(devices, make):
    devices = devices[:2]
    expected, most, never = trained(make, devices, "never")
    _, least, always = trained(make, devices, "always")
    nothing = selective(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    for mode, time in ((selective(dear), never), (nothing, always)):
        found, peak, seen = trained(make, devices, mode)
        assert all(map(torch.equal, found, expected))
        assert seen.makespan == time.makespan
        if mode is not nothing:
            assert least < peak < most


class Moving(nn.Module):
    """A layer with a buffer that it changes, and copies."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.mean.clone()


def changing(devices, mode):
    layers = [nn.Linear(32, 32), Moving(), nn.BatchNorm1d(16), nn.Tanh()]
    return wrap(layers, devices[:2], mode, M)


def test_a_policy_is_asked_for_the_layers_alone(devices):
    asked = []

    def noting(context, op, *args, **kwargs):
        asked.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    model = changing(devices, selective(noting))
    model(torch.rand(2 * M, 16, 32, device=devices[0]))
    # The layer's own, and not those for recomputations.
    assert asked.count(aten.clone.default) == M


def test_layers_that_change_buffers_under_a_policy(devices):
    """Buffers are copied around one of the two runs, and PyTorch numbers operators in both."""
    expected, *_ = trained(changing, devices, "never")
    for kept in (aten.addmm.default, aten.clone.default):
        found, *_ = trained(changing, devices, selective([kept]))
        assert all(map(torch.equal, found, expected))


def test_a_policy_is_described(devices):
    model = of_gpipe(devices[:4], [selective(dear), "never", "offload", "always"])
    rows = [row.checkpoint for row in model.describe().rows]
    assert rows == ["selective", "never", "offload", "always"]
    assert {row.checkpoint for row in of_map(devices[:2], selective(dear)).describe().rows} == {
        "selective"
    }


def test_stages_that_are_graphs_take_no_policy(devices):
    step = of_schedule(devices[:2], selective(dear))
    step.stages = "graph"
    with pytest.raises(ValueError, match=r"a stage that is a graph keeps all .*'selective'"):
        step(torch.rand(2 * M, 16, 32, device=devices[0]))
