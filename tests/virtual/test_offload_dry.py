"""Dry runs of cells that are away: the same figures as with values, and the host's memory."""

import pytest
import torch
from torch import nn

from tests.support.dry import HARDWARE, dry, real
from tests.support.helpers import wrap
from tests.support.offload import Attention
from torchgpipe import Offload, ScheduledLoss
from torchgpipe.engine.stages import stages_of
from torchgpipe.testing import dry_run

M, WIDTH = 6, 128


def squares(output):
    return output.pow(2).mean()


def maker(mode, name, models):
    def make(devices):
        torch.manual_seed(0)
        model = wrap([Attention(WIDTH) for _ in devices], devices, mode, M)
        models.append(model)
        training = model if name == "gpipe" else ScheduledLoss(model, squares, name)
        x = torch.rand(4 * M, 32, WIDTH).to(devices[0])

        def step():
            training.zero_grad()
            output = training(x)
            (squares(output) if name == "gpipe" else output).backward()

        return step

    return make


def hosted(model):
    return sum(sum(x.sizes) for x in stages_of(model).pool._hosts.values())


def figures(run, mode, name, devices):
    """The figures of a run, and the bytes of its host, when the model is gone."""
    models = []
    found = run(maker(mode, name, models), devices)
    return found, hosted(models.pop())


@pytest.mark.parametrize("mode", ["offload", Offload(share=0.5)], ids=str)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_figures(devices, name, mode):
    (allocated, _, time), first = figures(dry, mode, name, devices[:3])
    (expected, _, other), second = figures(real, mode, name, devices[:3])
    (never, _, quicker), none = figures(dry, "never", name, devices[:3])
    assert first == second > none == 0
    assert time == pytest.approx(other, rel=1e-12)
    # Threads of autograd's free what they have copied sooner or later: a tensor is 2.5 % of it.
    assert allocated == pytest.approx(expected, rel=0.05)
    # Three workers of 1F1B have few cells that leave.
    assert allocated[0] < never[0] or name == "1f1b"
    assert time >= quicker


def test_memory_of_the_host_is_told(devices):
    models = []
    found = dry_run(maker("offload", "gpipe", models), 3, HARDWARE)
    assert found.host >= hosted(models[0]) > 0
    assert "pinned memory of the host: " in str(found)
    assert {x.kind for x in found.timeline.spans} >= {"out", "back"}


def test_values_are_read_from_pinned_memory_no_more_than_elsewhere(devices):
    def make(devices):
        layer = nn.Linear(2, 2).to(devices[0])
        pinned = torch.empty(2, pin_memory=True)
        return lambda: pinned.copy_(layer(torch.ones(2, device=devices[0])), non_blocking=True)

    with pytest.raises(RuntimeError, match="computes no values"):
        dry_run(make, 1, HARDWARE)
