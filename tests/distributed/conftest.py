"""The processes of these tests."""

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def processes():
    found = Processes()
    yield found
    found.stop()
