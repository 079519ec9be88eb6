"""The body of a cell: the layers of a partition."""

import gc
import weakref

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.engine.body import starts_in_place


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.ReLU(inplace=True), True),
        (nn.ReLU(), False),
        (nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), nn.Tanh()), True),
        (nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True)), False),
        (nn.Sequential(), False),
    ],
)
def test_starts_in_place(layer, expected):
    assert starts_in_place(layer) == expected


class Fail(nn.Module):
    """Raises, and keeps what it raised."""

    def forward(self, x):
        self.error = ValueError("x")
        raise self.error


class Watch(nn.Module):
    """Watches the memory of its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        output = self.linear(x)
        self.memory = weakref.ref(output.untyped_storage())
        return output.exp()


def test_a_graph_holds_no_other_partitions():
    """So it is freed when it is dropped, though the layer that failed keeps the exception."""
    model = GPipe(nn.Sequential(Watch(), Fail()), [1, 1], devices=["cpu"] * 2, checkpoint="always")
    with pytest.raises(ValueError, match="x"):
        model(torch.ones(1, 2))
    memory = model[0].memory
    del model
    gc.collect()
    assert memory() is None
