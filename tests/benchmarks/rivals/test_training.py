"""A model in training takes as many steps as asked."""

import pytest
import torch

from benchmarks.rivals.library import Library
from benchmarks.rivals.training import Training
from torchgpipe import GPipe

MODEL = {"name": "unet", "depth": 1, "num_convs": 1, "base_channels": 4, "dropout": 0.0}


@pytest.fixture
def training():
    """The plain model on the CPU."""
    return Training(Library(GPipe, [torch.device("cpu")]), MODEL, size=8, batch=2)


def test_a_step_changes_weights_by_gradients(training):
    (group,) = training.optimizer.param_groups
    group["lr"] = 1.0
    before = [x.detach().clone() for x in training.model.parameters()]
    training.model(training.input).square().mean().backward()
    expected = [x - y.grad for x, y in zip(before, training.model.parameters())]
    training.optimizer.zero_grad()
    training.step()
    for found, wanted in zip(training.model.parameters(), expected):
        torch.testing.assert_close(found, wanted)
        assert found.grad is None
