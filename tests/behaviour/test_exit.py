"""The process ends promptly, with its main thread's status, even in the middle of a step."""

import os
import signal

import pytest

from tests.support.exits import PROGRAMS, endings

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(scope="module")
def ended():
    return endings([name for name in PROGRAMS if name.endswith("cpu")])


def test_many_live_wrappers(ended):
    assert ended["live, cpu"] == [0, "end\n", ""]


@pytest.mark.parametrize("function", ["sleep", "compute"])
def test_interrupted_within_a_cell(ended, function):
    status, out, err = ended[f"interrupted amid {function}, cpu"]
    assert err.endswith("\nKeyboardInterrupt\n")
    assert (status, out) == (-signal.SIGINT, "")
