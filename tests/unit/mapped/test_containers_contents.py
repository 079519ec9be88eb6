"""Contents of lists, dicts and plain objects: what is looked into, and what is given back."""

import logging
import threading
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchgpipe.mapped.containers import COUNT, DEPTH, Contents, fill

a, b, c = object(), object(), object()

CASES = {
    "list": ([a], [b, c]),
    "deque": (deque([a]), deque([b])),
    "set": ({a}, {b, c}),
    "dict": ({1: a, 2: b}, {2: c, 3: a}),
    "value of a dict": ({1: a, 2: b}, {1: a, 2: c}),
    "ordered": (OrderedDict(x=a), OrderedDict(y=b)),
    "default": (defaultdict(list, x=a), defaultdict(list, x=b)),
    "namespace": (SimpleNamespace(x=a, y=b), SimpleNamespace(y=c)),
    "within a tuple": (([a],), ([b],)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_there_is_put_there_and_taken_away(name):
    first, second = CASES[name]
    found, other = Contents.of(first), Contents.of(second)
    assert not found.is_changed
    # Both are of one form, so the second has what fills the first.
    (container, before), (_, after) = found.found[0], other.found[0]
    now = Contents([(container, after)])
    assert now.is_changed
    replaced = now.put()
    assert found.is_changed
    assert not now.is_changed
    for x in replaced:
        fill(*x)
    assert not found.is_changed
    assert [*found.found[0][1]] == before


def test_another_order_of_a_set_is_no_change():
    # Hashes that meet in one slot of the table: what is put in first comes out first.
    x, y = 8, 16
    held = {x, y}
    contents = Contents.of(held)
    fill(held, [y, x])
    assert [*held] == [y, x]
    assert not contents.is_changed


class Guarded:
    def __setattr__(self, name, value):
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        "text",
        (1, (2, 3)),
        torch.ones(2),
        nn.Linear(1, 1),
        nn.Linear,
        torch.Generator(),
        threading.Event(),
        logging.getLogger("torchgpipe"),
        len,
        test_what_was_there_is_put_there_and_taken_away,
        pytest,
        Guarded(),
        Contents([]),
        [*range(COUNT + 1)],
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_looked_into(value):
    assert Contents.of(value) is None


def test_depth_and_circles():
    value = inner = []
    for _ in range(DEPTH + 2):
        inner.append([])
        (inner,) = inner
    assert len(Contents.of(value).found) == DEPTH
    value = [{}]
    value[0]["circle"] = value
    assert len(Contents.of(value).found) == 2
