"""Contents of lists, dicts and plain objects: what is looked into, and what is put there."""

import logging
import threading
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchgpipe.mapped.containers import COUNT, DEPTH, fill, within

a, b = object(), object()


@pytest.mark.parametrize(
    "value",
    [
        [a, b],
        (a, (b,)),
        deque([[a], b]),
        {a, b},
        {1: a, 2: {3: b}},
        OrderedDict(x=a, y=b),
        defaultdict(list, x=[a, b]),
        SimpleNamespace(x=SimpleNamespace(y=a), z=b),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_looked_into(value):
    found = within(value)
    assert sum(x is a for x in found) == sum(x is b for x in found) == 1


def test_what_is_put_there():
    for container in ([1], deque([1])):
        fill(container, [a, b])
        assert [*container] == [a, b]
    for container in ({1: 2}, OrderedDict(x=1)):
        fill(container, ["key", a])
        assert dict(container) == {"key": a}
    fill(held := {1}, [a, b])
    assert held == {a, b}


class Guarded:
    def __setattr__(self, name, value):
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        "text",
        torch.ones(2),
        nn.Linear(1, 1),
        nn.Linear,
        torch.Generator(),
        threading.Event(),
        logging.getLogger("torchgpipe"),
        len,
        test_what_is_looked_into,
        pytest,
        Guarded(),
        [*range(COUNT + 1)],
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_looked_into(value):
    assert within(value) == []


def test_depth_and_circles():
    value = inner = []
    for _ in range(DEPTH + 2):
        inner.append([])
        (inner,) = inner
    assert len(within(value)) == DEPTH
    value = [{}]
    value[0]["circle"] = value
    assert len(within(value)) == 3
