"""Sizes of tests: a part with every value, or all combinations with ``TORCHGPIPE_SOAK=1``."""

import os
from collections import defaultdict
from itertools import product

import pytest

#: Whether to try all combinations, many seeds and long runs, as `make soak` does.
SOAK = os.environ.get("TORCHGPIPE_SOAK") == "1"

#: Marks a test that takes long and shows little more than a shorter one.
soak = pytest.mark.soak


def some(full, few):
    """A number of steps or examples, or a list of cases: all of it in a soak, few otherwise."""
    return full if SOAK else few


def rotated(*axes):
    """The combinations of values that :func:`rotate` takes."""
    if SOAK:
        return [*product(*axes)]
    second = sorted(map(len, axes))[-2]
    found = product(*map(enumerate, axes))
    return [tuple(x for _, x in case) for case in found if sum(k for k, _ in case) % second == 0]


def rotate(items):
    """Divide tests into those to run and those for a soak only.

    Take a test function with several axes, each of them one ``parametrize`` or one fixture with
    params. Number the values of each axis. A combination is taken if its numbers add up to a
    multiple of the length of the second longest axis. So every value of every axis is taken, and
    with three axes of one length every pair of values. A function that needs all combinations is
    marked by ``pytest.mark.full``.
    """
    functions = defaultdict(list)
    dropped = {item for item in items if item.get_closest_marker("soak")}
    for item in items:
        if item in dropped or item.get_closest_marker("full"):
            continue
        if hasattr(item, "callspec"):
            functions[item.parent, item.originalname].append(item)
    for cases in functions.values():
        numbers = [numbered(axis) for axis in zip(*map(values, cases))]
        if len(numbers) > 1:
            second = sorted(max(axis) + 1 for axis in numbers)[-2]
            dropped |= {x for x, *numbers in zip(cases, *numbers) if sum(numbers) % second}
    return [x for x in items if x not in dropped], [x for x in items if x in dropped]


def values(item):
    """Values that a test takes from each of its axes."""
    rest = {name: id(value) for name, value in item.callspec.params.items()}
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        axes.append(tuple(rest.pop(name.strip()) for name in names))
    return axes + [*rest.values()]


def numbered(axis):
    """The numbers of values, in the order in which they come first."""
    numbers = {}
    return [numbers.setdefault(value, len(numbers)) for value in axis]
