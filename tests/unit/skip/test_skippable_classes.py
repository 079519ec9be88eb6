"""Instances of classes that are made while the program runs."""

import copy
import pickle
from functools import cache

import pytest

from torchgpipe.skip.skippable import picklable


class Base:
    def __init__(self, value):
        self.value = value


@cache
def made(name):
    return picklable(type(name, (Base,), {}), made, name)


class Derived(made("Made")):
    """Pickle finds this one."""


@pytest.mark.parametrize("cls", [made("Made"), made("Other"), Derived])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_instances_are_pickled_and_copied(cls, protocol):
    one = cls([1])
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one, protocol))):
        assert type(twin) is cls
        assert twin.value == [1]
