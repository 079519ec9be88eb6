"""Stages of torch.distributed.pipelining train the model that they are given."""

import os
import signal

import pytest
import torch
from torch import nn

from benchmarks.models.experiments import build, samples
from benchmarks.rivals.library import Library
from benchmarks.rivals.stage import Stage
from benchmarks.rivals.stages import Stages
from tests.support.size import soak
from torchgpipe import GPipe
from torchgpipe._torch.dynamo import VERSION

# Normalisations are of a sample, and nothing is dropped: micro-batches make no difference.
MODEL = {"name": "unet", "depth": 2, "num_convs": 1, "base_channels": 4, "dropout": 0.0}
SETTING = {"model": MODEL, "size": 8, "batch": 4, "m": 2}
LIBRARY = Library(GPipe, [torch.device("cpu")] * 8)


def expected(m):
    """The losses and gradients of the plain model."""
    torch.manual_seed(0)
    layers = build(MODEL)
    input = samples(MODEL, 8, 4, "cpu")
    losses = [layers(x).square().mean() for x in input.split(4 // m)]
    torch.stack(losses).mean().backward()
    return [x.item() for x in losses], [x.grad for x in layers.parameters()]


@pytest.mark.skipif(VERSION < (2, 11), reason="gloo ends the processes of stages with PyTorch 2.9")
@pytest.mark.parametrize(
    ("schedule", "mode"),
    [pytest.param("ScheduleGPipe", "always", marks=soak), ("Schedule1F1B", "never")],
)
def test_same_as_plain(schedule, mode):
    count = len(build(MODEL))
    # The first cut is right after a stash.
    stages = Stages(LIBRARY, **SETTING, balance=[5, count - 5], mode=mode, schedule=schedule)
    losses, grads = stages.outcome()
    expected_losses, expected_grads = expected(2)
    assert losses == pytest.approx(expected_losses)
    assert len(grads) == len(expected_grads)
    for found, wanted in zip(grads, expected_grads):
        torch.testing.assert_close(torch.tensor(found), wanted)
    assert stages.parameters() == sum(x.numel() for x in expected_grads)
    assert len(stages.seconds(steps=2)) == 2
    stages.close()


@pytest.mark.parametrize(("mode", "count"), [("never", 1), ("except_last", 2), ("always", 2)])
def test_checkpoints(mode, count):
    partition = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    computed = []
    partition.register_forward_pre_hook(lambda *_: computed.append(mode))
    stage = Stage(partition, mode)
    stage(torch.rand(3, 2).requires_grad_()).sum().backward()
    assert len(computed) == count


def test_failure_ends_all():
    stages = Stages(LIBRARY, **SETTING, balance=[5, len(build(MODEL)) - 5], mode="never")
    first, second = (x.pid for x in stages.processes)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"stage \d failed"):
        stages.seconds(steps=1)
    for process in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"m": 3}, "must have the same size"),
        ({"m": 1, "schedule": "Schedule1F1B"}, "1F1B needs as many micro-batches"),
    ],
)
def test_impossible(other, reason):
    with pytest.raises(ValueError, match=reason):
        Stages(LIBRARY, **{**SETTING, **other}, balance=[1, 1], mode="never")


def test_a_gpu_for_each_stage():
    shared = Library(GPipe, [torch.device("cuda", 0)] * 2)
    with pytest.raises(ValueError, match="each stage needs a GPU"):
        Stages(shared, **SETTING, balance=[1, 1], mode="never")
