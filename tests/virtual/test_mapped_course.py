"""The cells of a course: what each of the ways to get one gives."""

import pytest
from torch import nn

from torchgpipe.mapped.course import CourseCells
from torchgpipe.mapped.step import Lasting, MappedStep


@pytest.fixture
def cells(devices):
    """The cells of one micro-batch, in a step on two devices."""
    model = nn.Linear(1, 1)
    step = MappedStep(Lasting(), devices[:2], model, 1, {})
    with step.numbers:
        found = CourseCells(step, 0, None)
        yield found
        found.close()
        step.leave_streams()


WAYS = {
    "enter": lambda cells, device: cells.enter(device, ()),
    "go_on": lambda cells, device: cells.go_on(device),
    "at": lambda cells, device: cells.at(device),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_cell_of_a_device_begins(cells, devices, way):
    found = WAYS[way](cells, devices[0])
    assert (found.stage.device, found.stage.visit) == (devices[0], 0)
    assert found.entered == (way == "enter")
    assert cells.present is (found if way == "enter" else None)


@pytest.mark.parametrize("way", WAYS)
def test_a_cell_that_was_not_entered_serves_all(cells, devices, way):
    found = cells.at(devices[0])
    assert WAYS[way](cells, devices[0]) is found


@pytest.mark.parametrize("way", WAYS)
def test_the_present_cell_serves_all(cells, devices, way):
    found = cells.enter(devices[0], ())
    assert WAYS[way](cells, devices[0]) is found


@pytest.mark.parametrize("way", WAYS)
def test_a_device_that_was_left_is_visited_again(cells, devices, way):
    """Tensors that an earlier visit has left are still taken from there."""
    first, other = cells.enter(devices[0], ()), cells.enter(devices[1], ())
    found = WAYS[way](cells, devices[0])
    assert (found is first) == (way == "at")
    assert found.stage.visit == (way != "at")
    assert cells.present is (found if way == "enter" else other)
    assert cells.later == ({} if way == "at" else {devices[0]: found})
