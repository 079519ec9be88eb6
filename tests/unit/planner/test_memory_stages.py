"""Stages keep what their layers keep, each tensor once, and skips that a layer pops."""

import pytest
import torch
from torch import nn

from tests.support.planning import Join, Keep
from torchgpipe.planner.layers import measured
from torchgpipe.planner.memory import Stage
from torchgpipe.skip import Namespace
from torchgpipe.values.microbatch import Batch

CPU = torch.device("cpu")

#: The bytes of ten rows of six numbers.
SIZE = 10 * 6 * 4


def stage(layers, start=0, stop=None, shape=(10, 6)):
    x = torch.rand(shape, requires_grad=True)
    found = measured(nn.Sequential(*layers), {10: Batch(x)}, CPU, timeout=None)
    own = range(start, len(layers) if stop is None else stop)
    return Stage(found, [x.at(10) for x in found], 10, own, is_summed=True)


def linear():
    return nn.Linear(6, 6, bias=False)


@pytest.mark.parametrize(
    ("layers", "tensors"),
    [
        # Each keeps its output, or its input, which nobody counts twice.
        ([nn.Tanh(), linear(), nn.Tanh()], 2),
        # The sigmoid keeps its own output, and nobody keeps that of the linear layer.
        ([linear(), nn.Sigmoid()], 1),
        # What is handed on is kept by the layer after.
        ([linear(), nn.Identity(), linear()], 1),
        ([linear(), nn.ReLU(inplace=True), linear()], 1),
        # The last output is not kept.
        ([linear()], 0),
    ],
)
def test_kept(layers, tensors):
    assert stage(layers).kept == tensors * SIZE


def test_what_arrives():
    layers = [linear(), linear(), nn.Tanh()]
    found = stage(layers, 1)
    assert found.stored == SIZE
    assert found.kept == 2 * SIZE
    assert found.arrivals == [(0, SIZE, SIZE)]
    # W begins with the gradient of the linear layer's output, and with its input. The gradient that
    # came back for the stage counts, too, which I lets go of.
    assert found.pending == 3 * SIZE
    assert found.workspaces["F"] == SIZE


def test_skips():
    space = Namespace()
    layers = [nn.Conv2d(1, 1, 1), Keep().isolate(space), nn.Tanh(), Join().isolate(space)]
    found = stage(layers, 3, shape=(10, 1, 2, 3))
    assert sorted(found.arrivals) == [(1, SIZE, SIZE), (2, SIZE, SIZE)]
    assert found.stored == 2 * SIZE
    # To join tensors keeps none of them.
    assert found.kept == SIZE
    assert stage(layers, 0, 3, shape=(10, 1, 2, 3)).gets == 2 * SIZE
