"""Long runs: no step, failed or not, leaves anything behind, without the garbage collector."""

import pytest

from tests.support.long_runs import CASES, WAYS, Training, uncollected, verify_nothing_stays


@pytest.fixture(params=WAYS)
def training(request):
    """Trainings on the CPU, for each way to issue cells."""
    return Training(WAYS[request.param])


def test_steps_leave_nothing_behind(training):
    verify_nothing_stays(training.step)


def test_failing_steps_leave_nothing_behind(training):
    """The run is compared with one that never failed."""
    verify_nothing_stays(training.failing_step, warm_up=training.step)


@pytest.mark.parametrize("k", range(len(CASES)), ids=lambda k: ", ".join(CASES[k]))
def test_nothing_is_alive_after_a_step_that_failed(training, k):
    training.step(0)
    with uncollected():
        training.failing_step(k)
        assert training.alive == 0
        training.step(k)
        assert training.alive == 0
