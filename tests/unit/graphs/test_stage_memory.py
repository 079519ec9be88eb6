"""Memory is counted from fake tensors, each storage once."""

import torch
from torch import nn

from tests.support.graphs import Stage, kept


def test_kept():
    stage = Stage(nn.Linear(4, 8), torch.rand(3, 4, requires_grad=True))
    # The input, and then also the gradient of the output.
    assert kept(stage.parts) == (3 * 4 * 4, 3 * 4 * 4 + 3 * 8 * 4, 3 * 4 * 4)


def test_views_take_nothing():
    stage = Stage(nn.Sequential(nn.Tanh(), nn.Flatten()), torch.rand(2, 3, 4, requires_grad=True))
    assert kept(stage.parts).activation == 2 * 3 * 4 * 4


def test_checkpoint_has_copies_of_buffers_that_change():
    stage = Stage(nn.BatchNorm1d(4), torch.rand(3, 4))
    assert kept(stage.parts).checkpoint == 3 * 4 * 4 + 2 * 4 * 4
