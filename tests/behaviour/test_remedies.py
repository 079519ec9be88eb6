"""A remedy that a message names is one that its caller does not follow already."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.contract.layers import Pop, Stash
from torchgpipe import GPipe, MappedGPipe, PerMicroBatch, ScheduledLoss


def wrapped(*layers):
    return GPipe(nn.Sequential(*layers), [len(layers)], devices=["cpu"], chunks=2)


@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_stages(stages):
    """Graphs are no remedy for a word that is none."""
    with pytest.raises(ValueError, match="recompute must be one of") as found:
        ScheduledLoss(wrapped(nn.Linear(4, 4)), F.mse_loss, stages=stages, recompute="nothing")
    assert "stages='graph'" not in str(found.value)


class Growing(nn.Module):
    """A layer that marks something of another shape in each micro-batch."""

    def forward(self, x):
        return x, PerMicroBatch(x[x[:, 0] > 0])


@pytest.mark.parametrize(("rows", "uneven"), [(4, False), (5, True)])
def test_rows(rows, uneven):
    """A mini-batch whose rows are a multiple of chunks is no remedy if it is one."""
    x = torch.ones(rows, 2)
    x[0] = -1
    if uneven:
        x = x.abs()
    with pytest.raises(ValueError, match="same shape in all micro-batches") as found:
        wrapped(Growing())(x)
    assert ("multiple of chunks" in str(found.value)) == uneven


class Reading(nn.Module):
    """A layer that no graph can be made of."""

    def forward(self, x):
        return x * 2 if x.sum() > -9 else x


@pytest.mark.filterwarnings("ignore:a stage must be traceable")
@pytest.mark.parametrize(("layer", "steps"), [(Reading(), 2), (nn.Tanh(), 1)])
def test_graphs(layer, steps):
    """More steps are no remedy for a stage that cannot be a graph."""
    model = wrapped(nn.Linear(4, 4), layer)
    training = ScheduledLoss(model, F.mse_loss, "fill_drain", stages="graph")
    for _ in range(steps):
        training(torch.rand(4, 4), torch.rand(4, 4))
    with pytest.raises(ValueError, match="has a graph once") as found:
        training.graphs[0].print()
    assert ("change the layer" in str(found.value)) == (steps > 1)
    assert ("another step" in str(found.value)) == (steps == 1)


def test_skips_between_modules_of_a_map():
    """All layers run, in order, and yet the one that pops finds nothing."""
    layers = nn.Sequential(nn.Linear(4, 3), Stash(torch.exp), Pop())
    model = MappedGPipe(layers, {str(k): "cpu" for k in range(3)}, chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match="within one of them, or wrap the layers in a GPipe"):
        model(torch.rand(4, 4))
