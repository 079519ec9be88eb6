"""A call that waits is told from others by what the device had to do."""

import pytest
import torch

from torchgpipe.devices.recorder import Mark
from torchgpipe.devices.streams import CPU, current_stream
from torchgpipe.planner.observed import HostWait, Waits


class Clock:
    """A recorder whose times are listed: the host before a call, the device then, and the host."""

    def __init__(self, *times):
        self.at_steps = []
        self._times = iter(times)

    def issued(self, device):
        return next(self._times)

    def before(self, stream):
        return next(self._times)

    def bounds(self, time):
        return time, time


def seen(function, *times, end=10.0):
    clock = Clock(*times)
    waits = Waits(clock)
    with waits.within(Mark("F", current_stream(CPU), 0, 0, 0)):
        function(torch.ones(2))
    found = waits.found({0: end})
    clock.at_steps[0]()
    assert waits.found({0: end}) == {}
    return found


@pytest.mark.parametrize("function", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 1)])
def test_waits(function):
    # The device had work until 7, and the host went on then. The cell ended at 10.
    assert seen(function, 1.0, 7.0, 7.0) == {0: HostWait(6.0, 3.0)}


def test_calls_that_do_not_wait():
    # The host is ahead of the device.
    assert seen(lambda x: x[0], 1.0, 7.0, 1.1) == {}
    # The device had nothing to do.
    assert seen(lambda x: x.tolist(), 5.0, 5.0, 5.1) == {}
    assert seen(lambda x: x + 1) == {}


def test_several():
    found = seen(lambda x: (x[0].item(), x[1]), 1.0, 1.0, 1.0, 2.0, 4.0, 4.0, 4.5, 8.0, 4.6)
    assert found == {0: HostWait(2.0, 6.0)}
