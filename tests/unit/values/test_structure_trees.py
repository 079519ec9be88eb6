"""Trees: leaves and containers, as PyTorch's own functions find them, and no garbage."""

import gc
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch.utils import _pytree

from tests.support.structures import Custom, Point, Registered
from torchgpipe.values.structure import flatten_tree, leaves_of, map_leaves

TREES = {
    "leaf": 1,
    "none": None,
    "tensor": torch.ones(2),
    "tuple": (1, (2, ())),
    "list": [[], [1], [[2, None]]],
    "dict": {"b": 1, "a": {"c": [2]}},
    "ordered dict": OrderedDict(b=1, a=(2,)),
    "default dict": defaultdict(list, {"a": [1]}),
    "deque": deque([1, [2]], maxlen=3),
    "named tuple": Point({"x": 1}, [2, 3]),
    "dataclass": Registered(torch.ones(1), None, scale=3.0),
    "registered": Custom([1, 2], "label"),
    "set": {1, 2},
    "class of torch": torch.max(torch.ones(2, 2), 0),
}


def is_list(x):
    return isinstance(x, list)


@pytest.mark.parametrize("is_leaf", [None, is_list], ids=["all", "lists are leaves"])
@pytest.mark.parametrize("name", TREES)
def test_leaves_and_containers_are_those_of_pytorch(name, is_leaf):
    tree = TREES[name]
    leaves, spec = flatten_tree(tree, is_leaf)
    expected, theirs = _pytree.tree_flatten(tree, is_leaf)
    assert len(leaves) == len(expected) == spec.count
    assert all(a is b for a, b in zip(leaves, expected))
    assert leaves_of(tree, is_leaf) == leaves
    numbers = [*range(len(leaves))]
    again = spec.unflatten(numbers)
    assert type(again) is type(_pytree.tree_unflatten(numbers, theirs))
    assert leaves_of(again, is_leaf) == numbers
    assert flatten_tree(again, is_leaf)[1] == spec


def test_trees_of_other_containers_differ():
    specs = [flatten_tree(x)[1] for x in TREES.values()]
    # Whatever the leaf is.
    distinct = [x for k, x in enumerate(specs) if x not in specs[:k]]
    assert len(distinct) == len(TREES) - 3
    assert flatten_tree({"a": 1})[1] != flatten_tree({"b": 1})[1]
    assert flatten_tree([1])[1] != flatten_tree([1, 2])[1]
    assert flatten_tree([1])[1] != [1]


def test_leaves_are_mapped():
    assert map_leaves(lambda x: x + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}
    assert map_leaves(len, {"a": [1, 2]}, is_list) == {"a": 2}


def test_nothing_is_left_to_the_collector():
    gc.collect()
    gc.disable()
    try:
        map_leaves(lambda x: x, [*TREES.values()])
        assert gc.collect() == 0
    finally:
        gc.enable()
