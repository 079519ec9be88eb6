"""The body of a cell: the layers of a partition."""

import pytest
from torch import nn

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
