"""Ctrl-C may come anywhere: the same tests on virtual accelerators."""

import pytest

# All of its tests, with other places.
from tests.behaviour.test_unwinding import *  # noqa: F403


@pytest.fixture(params=[[0, 1], [1, "cpu"]], ids=str)
def places(request, devices):
    return [x if x == "cpu" else devices[x] for x in request.param]
