"""The flat ResNet is the usual one: in the names and the shapes of its weights, and in values."""

import hashlib

import pytest
import torch

from benchmarks.models import resnet101, usual_name
from tests.benchmarks.models import count

#: Of the lines ``name (shape)`` of the state_dict of torchvision 0.29.2's ResNet-101.
TORCHVISION = "0e9191dd134cb07d7d14b0502545020b49f200c87fa62369fd7a6c70ca9c2aef"


@pytest.fixture(scope="module")
def state():
    """State of ResNet-101, without memory."""
    with torch.device("meta"):
        model = resnet101()
    assert count(model) == 44_549_160
    return model.state_dict()


def test_state_dict_is_that_of_torchvision(state):
    lines = "".join(f"{usual_name(key)} {tuple(x.shape)}\n" for key, x in state.items())
    assert hashlib.sha256(lines.encode()).hexdigest() == TORCHVISION
