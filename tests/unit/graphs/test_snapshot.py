"""Snapshots of objects tell whether these have changed."""

from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchgpipe.graphs.snapshot import snapshot


def closed(numbers):
    return lambda: numbers


NUMBERS = [1]
CASES = {
    "list": ([1, [2]], lambda x: x[1].append(3)),
    "dict": ({"a": {"b": 1}}, lambda x: x["a"].update(b=2)),
    "deque": (deque([1]), lambda x: x.append(2)),
    "object": (SimpleNamespace(a=SimpleNamespace(b=1)), lambda x: setattr(x.a, "b", 2)),
    "closure": (closed(NUMBERS), lambda x: NUMBERS.append(2)),
    "partial": (partial(print, [1]), lambda x: x.args[0].append(2)),
    "type": ([1], lambda x: x.__setitem__(0, 1.0)),
    "none": ([None], lambda x: x.__setitem__(0, torch.ones(1))),
}


@pytest.mark.parametrize("name", CASES)
def test_changes_are_seen(name):
    value, change = CASES[name]
    before = snapshot(value)
    assert snapshot(value) == before
    change(value)
    assert snapshot(value) != before


def test_what_does_not_count():
    """Values of tensors, modules, and what is not a number."""
    value = [torch.ones(2), nn.Linear(1, 1), float("nan")]
    before = snapshot(value)
    value[0] = torch.zeros(2)
    value[1].weight.data.zero_()
    assert snapshot(value) == before


def test_a_container_in_itself():
    value = []
    value.append(value)
    assert snapshot(value) == snapshot(value)
