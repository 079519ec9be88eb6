"""Garbage: a step of a pipeline leaves nothing to Python's collector, and ``del`` frees it."""

import gc
import weakref

import pytest
import torch
from torch import distributed as dist
from torch import nn

from torchgpipe.distributed import Pipe


@pytest.fixture
def alone():
    """A group of this process alone, and no collector."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    dist.destroy_process_group()


@pytest.mark.parametrize("training", [True, False], ids=["training", "forward"])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_leaves_nothing_and_del_frees_the_pipeline(schedule, mode, training, alone):
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipe = Pipe(
        layers, balance=[2], loss=nn.MSELoss(), chunks=2, checkpoint=mode, schedule=schedule
    ).train(training)
    del layers
    for _ in range(2):
        # PyTorch imports what it needs in the first one.
        gc.collect()
        pipe.step(torch.rand(8, 4), torch.rand(8, 4))
    assert gc.collect() == 0
    references = [weakref.ref(x) for x in (pipe, *pipe.modules(), *pipe.parameters())]
    del pipe
    assert [x() for x in references if x() is not None] == []
