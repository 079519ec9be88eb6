"""Code between mapped modules has its tensors brought to other devices before it copies them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchgpipe.mapped.calls import inside
from torchgpipe.mapped.containers import Changes
from torchgpipe.mapped.glue import Glue

CPU = torch.device("cpu")


class Course:
    """A course that notes what shall be moved; every device has streams here."""

    def __init__(self):
        self.moved = []
        self.later, self.tail = {}, None
        self.step = SimpleNamespace(changes=Changes(nn.Module()))

    def move(self, tensor, device):
        self.moved.append((tensor, device))
        return tensor.to(device)

    def together(self, tensors, target):
        """Bring all to the target, which is there wherever code changes something in place."""
        return {id(x): self.move(x, target) for x in tensors if x.device != target}


@pytest.fixture
def course(monkeypatch):
    monkeypatch.setattr("torchgpipe.mapped.glue.has_streams", lambda device: True)
    return Course()


META = torch.device("meta")
OTHER = torch.empty(1, device=META)


def write(x):
    torch.empty(2, device=META)[:] = x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to("meta"),
        lambda x: x.to(META, torch.float64),
        lambda x: x.to(device="meta"),
        lambda x: x.to(OTHER),
        lambda x: x.to(tensor=OTHER),
        lambda x: x.type_as(OTHER),
        lambda x: torch.empty(2, device=META).copy_(x, non_blocking=True),
        write,
    ],
)
def test_copies_to_another_device(course, function):
    x = torch.rand(2)
    with Glue(course):
        function(x)
    assert [(a is x, b) for a, b in course.moved] == [(True, META)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.float64),
        lambda x: x.to(dtype=torch.float64),
        lambda x: x.to(x),
        lambda x: x + 1,
        lambda x: torch.empty(2).copy_(x),
    ],
)
def test_what_stays(course, function):
    with Glue(course):
        function(torch.rand(2))
    assert course.moved == []


def test_devices_without_streams():
    course = Course()
    with Glue(course):
        assert torch.rand(2).to("meta").is_meta
    assert course.moved == []


def test_off_within_modules(course):
    with Glue(course) as glue:
        with inside(glue):
            torch.rand(2).to("meta")
        with torch.device("cpu"), inside(glue):
            # Another mode is within, which must not be left.
            assert torch.rand(2).to("meta").is_meta
        assert len(course.moved) == 1
        nn.Linear(2, 2).to("cpu")
