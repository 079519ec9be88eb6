"""Compiled layers on several accelerators: threads compile, and compile again in backward."""

import pytest
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
from tests.support.helpers import assert_no_races
from tests.support.size import some
from torchgpipe import GPipe
from torchgpipe.testing import observe

__all__ = ["anew", "backend", "pytestmark"]


def models(way, devices, backend, mode):
    """A model compiled in one of the ways, and a plain one."""
    layers = blocks()
    if way == "layers":
        layers = [torch.compile(x, backend=backend) for x in layers]
    elif way == "in place":
        for x in layers:
            x.compile(backend=backend)
    options = {"devices": devices, "chunks": 4, "checkpoint": mode}
    model = GPipe(nn.Sequential(*layers), [1] * 4, **options)
    if way == "partitions":
        for partition in model.partitions:
            partition.compile(backend=backend, fullgraph=True)
    return model.double(), GPipe(nn.Sequential(*blocks()), [1] * 4, **options).double()


@pytest.mark.parametrize(
    ("way", "mode"),
    some(
        [("layers", "never"), ("in place", "always"), ("partitions", "except_last")],
        [("in place", "always")],
    ),
)
def test_parity(way, mode, devices, backend):
    model, plain = models(way, devices[:2] * 2, backend, mode)
    for rows in some((8, 11, 8), (8,)):
        input = input_of(rows).to(devices[0])
        expected = step(plain, input)
        with observe() as seen:
            found = step(model, input)
        assert_no_races(seen)
        torch.testing.assert_close(found, expected)
    # On each device: graphs for one size and for any, for inputs with and without a gradient.
    assert backend.frame_count <= 2 * 4


def test_many_devices(devices):
    """Each device has graphs of its own, and the limit of graphs holds in every thread."""
    n, backend = some(8, 5), CompileCounterWithBackend(COUNTING)
    options = {"devices": devices[:n], "chunks": 4, "checkpoint": "always"}
    model, plain = (
        GPipe(nn.Sequential(*blocks(count=n)), [1] * n, **options).double() for _ in range(2)
    )
    for layer in model:
        layer.compile(backend=backend)
    with torch._dynamo.config.patch(recompile_limit=8 * len({*model.devices})):
        for rows in (8, 11):
            input = input_of(rows).to(devices[0])
            torch.testing.assert_close(step(model, input), step(plain, input))
    # Of one size and of any; those of the first device also see where rows begin.
    assert 2 * n <= backend.frame_count <= 2 * n + 4
