"""Settings of a step that a traced stage depends on."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchgpipe.graphs.traced import current_settings


@contextmanager
def double_precision():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: sdpa_kernel(SDPBackend.MATH),
        double_precision,
        deterministic,
    ],
)
def test_settings(setting):
    before = current_settings()
    with setting():
        assert current_settings() != before
    assert current_settings() == before
