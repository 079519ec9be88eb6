"""After an error anywhere in a step between devices, in a copy too, the next step is right."""

import pytest

from tests.behaviour.test_errors_anywhere import (
    NAMES,
    countdown,
    fail_anywhere,
    training_of,
)
from tests.support.helpers import MODES
from tests.support.schedules import ROW, workers_of
from torchgpipe.autograd import copy
from torchgpipe.executor import links

# Micro-batches on their way at the same time.
WRAPPERS = [*NAMES, "MappedGPipe threads"]


@pytest.fixture
def counted(monkeypatch):
    """Count copies between devices, before and behind each."""

    def counting(*args, **options):
        countdown()
        found = moved(*args, **options)
        countdown()
        return found

    moved = copy.moved
    for module in (copy, links):
        monkeypatch.setattr(module, "moved", counting)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_errors_anywhere(devices, name, mode, draws):
    number = WRAPPERS.index(name), MODES.index(mode)
    row = name.startswith(("GPipe", "zero_bubble_h1"))
    places = [devices[worker] for worker in (ROW if row else workers_of(name.split()[0]))]
    training = training_of(name, mode, draws, places)
    autocast = (sum(number) + draws) % 2 == 1
    fail_anywhere(training, autocast, places, 5 * number[0] + number[1], lambda count: count // 2)
