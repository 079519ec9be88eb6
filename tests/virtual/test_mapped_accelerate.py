"""Accelerate's loop over virtual accelerators, where batches are on the CPU."""

import pytest

from tests.behaviour import test_mapped_accelerate
from tests.behaviour.test_mapped_accelerate import resume, train
from tests.support.helpers import assert_no_races
from torchgpipe.testing import observe

# The weight of the head is used in two visits of its device.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

accelerate = test_mapped_accelerate.accelerate


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_training(accelerate, devices, options):
    with observe() as seen:
        train(accelerate, devices[:3], **options)
    assert_no_races(seen)


def test_state(accelerate, devices, tmp_path):
    resume(accelerate, devices[:3], tmp_path)
