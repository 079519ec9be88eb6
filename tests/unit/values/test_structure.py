"""Structures: values are taken apart into tensors, and put together again."""

import pytest
import torch

from tests.support.structures import Custom, Point, Registered
from torchgpipe import NoChunk
from torchgpipe.values.structure import Arguments, arguments, flatten, names

X, Y = torch.arange(4.0), torch.arange(8.0).view(4, 2)

VALUES = {
    "tensor": X,
    "tuple": (X, Y),
    "empty tuple": (),
    "list": [X, 3, Y],
    "dict": {"b": X, "a": None},
    "named tuple": Point(X, "point"),
    "dataclass": Registered(X, None, scale=2.0),
    "nested": {"a": [X, (Y, None)], "b": Point({"x": X}, [])},
    "no tensor": 3,
}


@pytest.mark.parametrize("name", VALUES)
def test_unflatten_is_the_inverse_of_flatten(name):
    tensors, structure = flatten(VALUES[name])
    assert all(isinstance(x, torch.Tensor) for x in tensors)
    again = structure.unflatten(tensors)
    assert type(again) is type(VALUES[name])
    assert all(a is b for (_, a), (_, b) in zip(names(again), names(VALUES[name])))


def test_names_are_paths():
    value = {"x": [X, NoChunk(Y)], "n": Point(1, 2)}
    assert [name for name, _ in names(value)] == ["['x'][0]", "['x'][1]", "['n'].x", "['n'].y"]
    assert [name for name, _ in names(X)] == ["the value"]
    assert [name for name, _ in names(Custom([X, Y], "label"))] == ["leaf 0", "leaf 1"]


def test_arguments_of_a_call():
    assert arguments((X,), {}) is X
    assert arguments((), {"input": X}) is X
    assert arguments((X,), {"y": Y}) == Arguments((X,), {"y": Y})
    assert arguments((X, Y), {}) == Arguments((X, Y), {})


def test_tensors_in_an_unknown_container_are_an_error():
    with pytest.raises(TypeError, match=r"class: set\); call .*register_pytree_node\(set"):
        flatten([X, {Y}])
    with pytest.raises(TypeError, match=r"NoChunk of: Tensor\); have layers return"):
        flatten([NoChunk(X)])
