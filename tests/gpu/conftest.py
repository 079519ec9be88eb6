"""GPUs, and an end in time."""

import os
import time

import pytest
import torch

BEGAN = time.monotonic()


@pytest.fixture(scope="session")
def gpus():
    """Two GPUs, or one twice."""
    count = torch.cuda.device_count()
    return [torch.device("cuda", k * (count > 1)) for k in range(2)]


@pytest.fixture(autouse=True)
def _in_time():
    # `make gpu` gives each part some seconds.
    if time.monotonic() - BEGAN > float(os.environ.get("BENCHMARK_SECONDS", "inf")):
        pytest.skip("the time of this part is over")
