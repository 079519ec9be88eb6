"""Errors of marks that do not belong where they are, and of what is divided otherwise."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import Chunk, Chunks, GPipe, MappedGPipe, NoChunk, ScheduledLoss, plan

X = torch.rand(4, 3)


def training(loss=F.mse_loss):
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2)
    model.chunks = 2
    return ScheduledLoss(model, loss)


@pytest.mark.parametrize("mark", [lambda x: x, NoChunk, lambda x: Chunk(x, 0), lambda x: [x]])
def test_targets_with_a_gradient(mark):
    target = torch.rand(4, 3, requires_grad=True)
    with pytest.raises(ValueError, match="must not require a gradient"):
        training(lambda y, t: y.mean())(X, mark(target))
    with pytest.raises(ValueError, match="must not require a gradient"):
        training(lambda y, t: y.mean())(Chunks(X.split(2)), Chunks(target.split(2)))


def test_targets_of_fewer_rows_than_ready_micro_batches():
    with pytest.raises(ValueError, match="rows: 2, micro-batches: 4"):
        training()(Chunks(X.split(1)), X[:2])


def test_targets_that_are_other_micro_batches():
    with pytest.raises(ValueError, match="entries: 3, micro-batches: 2"):
        training()(Chunks(X.split(2)), Chunks([X] * 3))


def test_sparse_tensors_have_no_rows():
    sparse = X.to_sparse()
    with pytest.raises(ValueError, match="dense"):
        Chunk(sparse, 0)
    model = MappedGPipe(nn.Linear(3, 3), {"": "cpu"})
    with pytest.raises(ValueError, match="only dense tensors"):
        model((Chunks([X, X]), sparse))


def test_samples_have_rows():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="must not be divided already"):
        plan(layers, (Chunks([X, X]),), devices=["cpu"] * 2, timeout=0.01)
