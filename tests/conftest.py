"""What all tests share."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from torchgpipe.stream import accelerators

# The same examples in every run; `make test HYPOTHESIS=explore` looks for new ones.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS", "default"))

# Small operators are faster alone, and so are two test processes side by side.
torch.set_num_threads(1)

VIRTUAL = Path(__file__).parent / "virtual"

#: The CPU, and one accelerator where there is one.
DEVICES = [torch.device("cpu"), *accelerators()[:1]]


def pytest_ignore_collect(collection_path, config):
    """What needs virtual accelerators runs in a process of its own, which asks for it by name."""
    if collection_path == VIRTUAL and not any("virtual" in name for name in config.args):
        return True
    return None


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    """Where a test computes."""
    return request.param
