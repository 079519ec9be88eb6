"""Long runs on accelerators leave nothing behind, without the garbage collector."""

import math

import pytest
import torch

from tests.support.long_runs import CASES, Training, eventually, uncollected, verify_nothing_stays
from torchgpipe import GPipe


@pytest.fixture(params=["caller", "workers"])
def training(request, devices, monkeypatch):
    """Let the caller issue the cells of all steps, or the workers."""
    monkeypatch.setattr(
        "torchgpipe.engine.workers.has_streams", lambda device: request.param == "caller"
    )
    # However long a busy machine lets the caller wait, no threads start in the middle of a run.
    monkeypatch.setattr("torchgpipe.engine.workers.ASLEEP", math.inf)
    return Training(GPipe, devices[:3])


@pytest.fixture
def allocated(devices):
    return lambda: sum(torch.accelerator.memory_allocated(device) for device in devices)


def test_steps_leave_nothing_behind(training, allocated):
    verify_nothing_stays(training.step, allocated=allocated)


def test_steps_beside_the_cpu_and_on_one_device_twice_leave_nothing_behind(devices, allocated):
    training = Training(GPipe, [devices[0], torch.device("cpu"), devices[0]])
    verify_nothing_stays(training.step, allocated=allocated)


def test_failing_steps_leave_nothing_behind(training, allocated):
    """The run is compared with one that never failed."""
    verify_nothing_stays(training.failing_step, warm_up=training.step, allocated=allocated)


@pytest.mark.parametrize("k", range(len(CASES)), ids=lambda k: ", ".join(CASES[k]))
def test_nothing_is_alive_after_a_step_that_failed(training, k):
    training.step(0)
    with uncollected():
        training.failing_step(k)
        assert eventually(lambda: training.alive == 0)
        training.step(k)
        assert eventually(lambda: training.alive == 0)
