"""Compiled layers on several accelerators: threads compile, and compile again in backward."""

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.behaviour.test_compiler import (
    COUNTING,
    anew,
    backend,
    blocks,
    input_of,
    pytestmark,
    step,
)
from tests.support.size import some
from torchgpipe import GPipe

__all__ = ["anew", "backend", "pytestmark"]


def test_many_devices(devices):
    """Each device has graphs of its own, and the limit of graphs holds in every thread."""
    n, backend = some(8, 2), CompileCounterWithBackend(COUNTING)
    options = {"devices": devices[:n], "chunks": 4, "checkpoint": "always"}
    model, plain = (
        GPipe(nn.Sequential(*blocks(count=n)), [1] * n, **options).double() for _ in range(2)
    )
    for layer in model:
        layer.compile(backend=backend)
    for rows in (8, 11):
        input = input_of(rows).to(devices[0])
        torch.testing.assert_close(step(model, input), step(plain, input))
    # Of one size and of any; those of the first device also see where rows begin.
    assert 2 * n <= backend.frame_count <= 2 * n + 4
    assert torch._dynamo.config.recompile_limit >= 8 * len(devices)
