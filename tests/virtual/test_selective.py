"""Cells whose recomputations compute again what a policy of PyTorch's does not keep."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import assert_no_races, wrap
from tests.support.offload import Attention
from torchgpipe import MappedGPipe, ScheduledLoss
from torchgpipe.testing import observe

M = 4
COSTS = {"addmm": 1.0, "mm": 1.0, "bmm": 1.0}
aten = torch.ops.aten


def dear(context, op, *args, **kwargs):
    """Keep products of matrices."""
    kept = op in (aten.addmm.default, aten.mm.default, aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy):
    return partial(create_selective_checkpoint_contexts, policy)


def of_gpipe(devices, mode):
    return wrap([Attention() for _ in range(4)], devices[:4], mode, M)


def of_schedule(devices, mode):
    return ScheduledLoss(of_gpipe(devices, mode), lambda y: y.pow(2).mean(), "1f1b")


def of_map(devices, mode):
    layers = nn.Sequential(*[Attention() for _ in range(4)])
    return MappedGPipe(layers, {str(k): devices[k] for k in range(4)}, chunks=M, checkpoint=mode)


def trained(make, devices, mode, *, jitter=None):
    """The gradients of a step, its time, and the highest peak of a device."""
    torch.manual_seed(0)
    model = make(devices, mode)
    x = torch.rand(2 * M, 16, 32, device=devices[0])
    gc.collect()
    for device in devices[:4]:
        torch.accelerator.reset_peak_memory_stats(device)
    with observe(costs=COSTS, jitter=jitter) as seen:
        y = model(x)
        (y if isinstance(model, ScheduledLoss) else y.pow(2).mean()).backward()
    assert_no_races(seen)
    grads = [x.grad.cpu() for x in model.parameters()]
    return grads, seen.makespan, max(map(torch.accelerator.max_memory_allocated, devices[:4]))


@pytest.mark.parametrize("make", [of_gpipe, of_schedule, of_map])
def test_what_a_policy_keeps_is_not_computed_again(devices, make):
    expected, never, most = trained(make, devices, "never")
    _, always, least = trained(make, devices, "always")
    nothing = selective(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    for mode, time in ((selective(dear), never), (nothing, always)):
        found, seen, peak = trained(make, devices, mode)
        assert all(map(torch.equal, found, expected))
        assert seen == time
        if mode is not nothing:
            assert least < peak < most
    found, _, _ = trained(make, devices, selective([aten.addmm.default]), jitter=0)
    assert all(map(torch.equal, found, expected))


def test_partitions_may_have_policies_beside_words(devices):
    expected, never, _ = trained(of_gpipe, devices, "never")
    modes = [selective(dear), "never", "offload", selective(dear)]
    found, time, _ = trained(of_gpipe, devices, modes)
    assert all(map(torch.equal, found, expected))
    assert time == never


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
    model = of_gpipe(devices, [selective(dear), "never", "offload", "always"])
    rows = [row.checkpoint for row in model.describe().rows]
    assert rows == ["selective", "never", "offload", "always"]
    assert {row.checkpoint for row in of_map(devices, selective(dear)).describe().rows} == {
        "selective"
    }


def test_stages_that_are_graphs_take_no_policy(devices):
    step = of_schedule(devices, selective(dear))
    step.stages = "graph"
    with pytest.raises(ValueError, match=r"a stage that is a graph keeps all .*'selective'"):
        step(torch.rand(2 * M, 16, 32, device=devices[0]))
