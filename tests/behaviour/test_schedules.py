"""Any schedule computes what the micro-batches give one after another."""

import pytest
import torch

from tests.support.helpers import MODES
from tests.support.schedules import CASES, NAMES, compare


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_buffers(case, name, mode):
    torch.manual_seed(0)
    compare(CASES[case](), name, ["cpu"] * 4, mode)
