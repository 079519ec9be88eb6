"""Schedules on virtual accelerators: right, without a race, and as fast as the simulator says."""

import pytest
import torch

from tests.support.helpers import MODES
from tests.support.schedules import CASES, NAMES, compare
from torchgpipe.testing import observe


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_buffers(devices, case, name, mode):
    torch.manual_seed(0)
    with observe(jitter=0) as seen:
        compare(CASES[case](), name, devices, mode)
    assert not seen.races
