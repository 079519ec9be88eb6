"""What all tests share."""

import os

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

#: The CPU, and one accelerator where there is one.
DEVICES = [torch.device("cpu"), *accelerators()[:1]]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    """Where a test computes."""
    return request.param
