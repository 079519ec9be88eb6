"""Ties: layers that share a weight."""

import pytest
from torch import nn

from torchgpipe.planner.ties import are_together, tied_apart, ties_of


def test_pairs():
    first, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    inner = nn.Sequential(nn.ReLU(), first)
    assert ties_of([first, nn.Linear(2, 2), inner, norm, norm]) == [(0, 2), (3, 4)]
    assert ties_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


@pytest.mark.parametrize(
    ("balance", "workers", "expected"),
    [
        ([2, 2], [0, 1], False),
        ([3, 1], [0, 1], True),
        ([1, 1, 1, 1], [0, 1, 0, 1], True),
        ([1, 1], [1, 0], False),  # Layer 2 is the loss, behind the last layer.
        ([1, 1], [0, 0], True),
    ],
)
def test_together(balance, workers, expected):
    assert are_together([(0, 2)], balance, workers) is expected


def test_error():
    assert "layers: 0 and 5" in str(tied_apart([(0, 5)], with_loss=True))
    texts = [str(tied_apart([(0, 5)], with_loss)) for with_loss in (False, True)]
    assert ["with a loss" in text for text in texts] == [True, False]
