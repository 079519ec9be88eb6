"""Tensors in arguments: found, and replaced in copies of the containers that they are in."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from torchgpipe.mapped.containers import (
    handing_back,
    map_arguments,
    map_tensors,
    replaced,
    tensors_of,
)

Pair = namedtuple("Pair", "first second")
A, B, C = (torch.tensor(float(k)) for k in range(3))


def test_tensors():
    value = ((A, None), {"x": [B], "y": Pair(C, 1)}, "text")
    found = tensors_of(value)
    assert [id(x) for x in found] == [id(A), id(B), id(C)]


@pytest.mark.parametrize(
    "value",
    [(A, 1), [A, None], {"x": A, "y": 1}, Pair(A, "b"), OrderedDict(x=A), ([{"x": (A,)}],)],
    ids=lambda x: type(x).__name__,
)
def test_replaced(value):
    found = replaced(value, {id(A): C})
    assert type(found) is type(value)
    assert tensors_of(found)[0] is C
    # The original is as it was.
    assert tensors_of(value)[0] is A
    assert replaced(value, {id(A): A, id(B): C}) is value


def test_only_what_changes_is_copied():
    same, other = [B], [A]
    value = ((same, other), {"x": {"y": A}, "z": []})
    copies = []
    args, kwargs = map_tensors(lambda x: C if x is A else x, value, copies)
    assert args[0] is same
    assert args[1] == [C]
    assert kwargs["z"] is value[1]["z"]
    assert list(kwargs) == ["x", "z"]
    assert [*map(id, copies)] == [id(args[1]), id(kwargs["x"]), id(kwargs)]


def test_arguments_of_a_call():
    copies, objects, cache = [], [], object()
    given = ((A, [A]), {"x": (B, None), "cache": cache})
    args, kwargs = map_arguments(lambda x: C, given, copies, objects)
    assert [*map(id, tensors_of((args, kwargs)))] == [id(C)] * 3
    assert tensors_of(given)[0] is A
    # The call itself has made the dict of keyword arguments.
    assert [*map(id, copies)] == [id(args[1])]
    assert objects == [cache]


def test_a_class_that_pytorch_does_not_know():
    class Arguments(dict):
        """A dict that stays as it is while none of its tensors has to be replaced."""

    value, objects, cache = Arguments(x=A, cache=object()), [], object()
    value["cache"] = cache
    assert map_tensors(lambda x: x, (value,), [], objects)[0] is value
    assert objects == [cache]
    with pytest.raises(TypeError):
        map_tensors(lambda x: C, (value,))


def test_state_stays_where_it_is():
    class Cache:
        keys = A

    cache = Cache()
    assert replaced((cache,), {id(A): C})[0] is cache


def test_changes_of_copies_are_handed_back():
    value = ([A, None], {"x": [B], "y": Pair({}, A)})
    held = value[1]["x"]
    copy = replaced(value, {id(A): C, id(B): torch.ones(2)})
    with handing_back(value, copy):
        copy[0].reverse()
        copy[1]["z"] = copy[1].pop("y")
        copy[1]["x"].append("new")
    assert value[0] == [None, A]
    assert value[0][1] is A
    assert list(value[1]) == ["x", "z"]
    assert value[1]["x"] is held
    assert [*map(id, held)] == [id(B), id(held[1])]
    assert value[1]["z"].second is A
