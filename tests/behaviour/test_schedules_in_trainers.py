"""Data parallelism and trainers of others take a scheduled loss for any loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.examples import MISSING
from torchgpipe import GPipe, ScheduledLoss

X, Y = torch.rand(6, 3), torch.rand(6, 3)


def make(schedule="zbh1"):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=3)
    return ScheduledLoss(model, F.mse_loss, schedule), copy.deepcopy(layers)


def plainly(layers, steps, factor=1.0):
    """Weights after some steps of a plain loop."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(steps):
        (F.mse_loss(layers(X), Y) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*layers.parameters()]


def same(training, expected):
    for own, other in zip(training.model.parameters(), expected, strict=True):
        torch.testing.assert_close(own, other)


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_distributed_data_parallel(options):
    training, layers = make()
    parallel = DistributedDataParallel(training, **options)
    calls = []
    parallel.register_comm_hook(None, lambda _, bucket: calls.append(1) or _done(bucket))
    optimizer = torch.optim.SGD(training.parameters(), lr=0.1)
    for _ in range(3):
        parallel(X, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(training, plainly(layers, 3))
    assert len(calls) == 3


def _done(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", exc_type=MISSING)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    training, layers = make()
    prepared, optimizer = accelerator.prepare(
        training, torch.optim.SGD(training.parameters(), lr=0.1)
    )
    for _ in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(X, Y))
            optimizer.step()
            optimizer.zero_grad()
    same(training, plainly(layers, 2))
