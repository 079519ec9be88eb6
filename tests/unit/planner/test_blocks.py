"""Memory of layers that hand on the memory of their input."""

import pytest
import torch
from torch import nn

from tests.support.helpers import Scale
from torchgpipe.planner.layers import measured
from torchgpipe.planner.stages import stage_of
from torchgpipe.values.microbatch import Batch

ROWS, CHANNELS, SIZE = 4, 2, 64
#: The bytes of what is between two layers.
UNIT = 4 * ROWS * CHANNELS * SIZE


def layers_of(*layers):
    batch = Batch(torch.rand(ROWS, CHANNELS, SIZE))
    device = torch.device("cpu")
    return measured(nn.Sequential(*layers), {ROWS: batch}, {ROWS: batch}, device, timeout=0)


@pytest.mark.parametrize(
    "between",
    [nn.ReLU(inplace=True), nn.Identity(), nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 64)))],
    ids=["in place", "itself", "view"],
)
def test_one_memory_is_counted_once(between):
    found = layers_of(Scale(), between, Scale())
    stage = stage_of(found, ROWS, None)
    assert found[1].memory.passes
    assert stage.kept == UNIT
    assert stage.output == UNIT
