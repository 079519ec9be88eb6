"""Snapshots of objects tell whether these have changed."""

import itertools
import logging
import random
import re
import weakref
from collections import deque
from contextvars import ContextVar
from ctypes import c_double
from functools import lru_cache, partial
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from torchgpipe.graphs.snapshot import OBJECTS, Snapshot


def look(value, known=()):
    return Snapshot([("it", value)], known)


def closed(numbers):
    return lambda: numbers


class Slotted:
    __slots__ = ("__private", "number")

    def __init__(self):
        self.number, self.__private = 1, [1]

    def method(self):
        return self.number


def nested(depth):
    value = found = [1]
    for _ in range(depth):
        value = [value]
    return value, found


class Named(dict):
    """A dict with attributes."""


class Proxy:
    """An object that looks like another one, which is not there."""

    @property
    def __dict__(self):
        raise RuntimeError("nothing is bound")


def marked():
    tensor = torch.ones(1)
    tensor.scale = [1]
    return tensor


NUMBERS, SOURCE, VARIABLE = [1], {"a": 1}, ContextVar("VARIABLE")
VARIABLE.set([1])
KEPT = lru_cache(lambda: NUMBERS)
KEPT()
DEEP, DEEPEST = nested(20)
MODULE = nn.Dropout(0.5)
CASES = {
    "list": ([1, [2]], lambda x: x[1].append(3)),
    "dict": ({"a": {"b": 1}}, lambda x: x["a"].update(b=2)),
    "deque": (deque([1]), lambda x: x.append(2)),
    "object": (SimpleNamespace(a=SimpleNamespace(b=1)), lambda x: setattr(x.a, "b", 2)),
    "closure": (closed(NUMBERS), lambda x: NUMBERS.append(2)),
    "partial": (partial(print, [1]), lambda x: x.args[0].append(2)),
    "type": ([1], lambda x: x.__setitem__(0, 1.0)),
    "none": ([None], lambda x: x.__setitem__(0, torch.ones(1))),
    "slots": (Slotted(), lambda x: setattr(x, "number", 2)),
    "private slot": (Slotted(), lambda x: x._Slotted__private.append(2)),
    "bound method": (Slotted().method, lambda x: setattr(x.__self__, "number", 2)),
    "deep": (DEEP, lambda x: DEEPEST.append(2)),
    "module in a tuple": ((MODULE,), lambda x: setattr(x[0], "p", 0.1)),
    "array": (numpy.zeros(3), lambda x: x.__setitem__(0, 1)),
    "random": (random.Random(0), lambda x: x.random()),
    "proxy": (MappingProxyType(SOURCE), lambda x: SOURCE.update(a=2)),
    "array of objects": (
        numpy.array([None, [1]], dtype=object),
        lambda x: x.__setitem__(0, 2),
    ),
    "array of objects, deep": (numpy.array([None, [1]], dtype=object), lambda x: x[1].append(2)),
    "zero of an array": (numpy.zeros(1), lambda x: x.__setitem__(0, -0.0)),
    "zero": ([0.0], lambda x: x.__setitem__(0, -0.0)),
    "context variable": (VARIABLE, lambda x: x.get().append(2)),
    "weak reference": (weakref.ref(MODULE), lambda x: setattr(x(), "p", 0.3)),
    "attribute of a dict": (Named(), lambda x: setattr(x, "scale", 2)),
    "attribute of a tensor": (marked(), lambda x: x.scale.append(2)),
    "number of C": (c_double(1.0), lambda x: setattr(x, "value", 2.0)),
    "view of a dict": ({"a": [1]}.values(), lambda x: next(iter(x)).append(2)),
    "method of a dict": ({"a": [1]}.get, lambda x: x("a").append(2)),
    "complex": ([1j], lambda x: x.__setitem__(0, 2j)),
    "cached function": (KEPT, lambda x: x.cache_clear()),
    "numpy's random": (numpy.random.default_rng(0), lambda x: x.random()),
}


@pytest.mark.parametrize("name", CASES)
def test_changes_are_seen(name):
    value, change = CASES[name]
    before = look(value)
    assert look(value).same(before)
    assert not before.fault
    change(value)
    assert not look(value).same(before)


def test_what_does_not_count():
    """Values of tensors, modules that are known, services, and what is not a number."""
    layer = nn.Linear(1, 1)
    value = [torch.ones(2), layer, float("nan"), logging.getLogger("torchgpipe")]
    before = look(value, {id(layer)})
    value[0] = torch.zeros(2)
    value[1].weight.data.zero_()
    layer.eval()
    assert look(value, {id(layer)}).same(before)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (itertools.count(), r"iterator.*\(it\)"),
        ([[] for _ in range(OBJECTS)], "more than"),
        (numpy.zeros(2**18), "array of"),
        (Proxy(), r"cannot be looked into \(it: RuntimeError"),
    ],
)
def test_what_nobody_can_follow(value, fault):
    found = look(value)
    assert re.search(fault, found.fault)
    assert look(value).same(found)
