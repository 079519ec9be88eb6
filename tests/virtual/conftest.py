"""The virtual accelerators, loaded before anything runs backward."""

import os
import random
import zlib
from pathlib import Path

import pytest

from tests.support.size import SOAK
from torchgpipe import testing

REQUIRED = os.environ.get("TORCHGPIPE_REQUIRE_VIRTUAL") == "1"

if not SOAK and hasattr(os, "sched_setaffinity"):
    # One thread at a time has Python, and takes it over sooner on the same core.
    os.sched_setaffinity(0, {random.choice([*os.sched_getaffinity(0)])})

try:
    DEVICES = testing.load(8)
except testing.UnavailableError as error:
    if REQUIRED:
        raise
    DEVICES, REASON = [], str(error)


def pytest_collection_modifyitems(items):
    if not DEVICES:
        for item in [item for item in items if Path(__file__).parent in item.path.parents]:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def issuing(request, monkeypatch):
    """Make threads issue cells from the first step on in half of the tests."""
    if zlib.crc32(request.node.nodeid.encode()) % 2:
        monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: False)


@pytest.fixture(scope="session")
def devices():
    """Eight virtual accelerators."""
    return DEVICES


@pytest.fixture(scope="module")
def one_round():
    """Have layers and links measured once: their virtual times do not vary."""
    with pytest.MonkeyPatch.context() as patch:
        if not SOAK:
            patch.setattr("torchgpipe.planner.sandbox.LEAST", 1)
            patch.setattr("torchgpipe.planner.layers.SIZES", (2**14, 2**10))
            patch.setattr("torchgpipe.planner.layers.TIMES", 1)
        yield
