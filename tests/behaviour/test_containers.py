"""Containers of tensors must be registered with PyTorch; if not, the error says how."""

import pytest
from torch.utils._pytree import tree_map_only

from tests.support.structures import (
    DictOfTensors,
    ListOfTensors,
    Partial,
    Registered,
    Unregistered,
    model,
    passed,
    rows,
)
from torchgpipe import NoChunk

# Objects that hold tensors and are no known containers.

UNKNOWN = {
    "a dataclass": Unregistered,
    "in a list": lambda x: [x, Unregistered(x)],
    "in a registered one": lambda x: Registered(x, Unregistered(x)),
    "around others": lambda x: Unregistered([{"a": x}]),
    "in NoChunk": lambda x: [x, NoChunk(Unregistered(x))],
    "deep in NoChunk": lambda x: [x, NoChunk({"a": (Unregistered(x),)})],
}
REGISTER = r"class: Unregistered.*torch\.export\.register_dataclass\(Unregistered\)"


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unregistered_dataclass_is_an_error(name, chunks):
    wrapped = model(passed, passed, chunks=chunks)
    with pytest.raises(TypeError, match=REGISTER):
        wrapped(UNKNOWN[name](rows()))
    with pytest.raises(TypeError, match=REGISTER):
        wrapped(rows(), other=UNKNOWN[name](rows()))


@pytest.mark.parametrize("j", [0, 1])
@pytest.mark.parametrize("name", [name for name in UNKNOWN if "NoChunk" not in name])
def test_unregistered_dataclass_of_a_layer_is_an_error(name, j):
    layers = [passed, passed]
    layers[j] = Partial(UNKNOWN[name])
    with pytest.raises(TypeError, match=REGISTER):
        model(*layers)(rows())


def test_unregistered_dataclass_without_tensors_is_a_value():
    output = model(passed)((rows(), Unregistered(3)))
    assert output[1] == Unregistered(3)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: DictOfTensors(a=x), "DictOfTensors"),
        (lambda x: ListOfTensors([x]), "ListOfTensors"),
        (lambda x: {"a": [ListOfTensors([1, [x]])]}, "ListOfTensors"),
        (lambda x: (x, {x}), "set"),
        (lambda x: [x, NoChunk(DictOfTensors(a=x))], "DictOfTensors"),
    ],
)
def test_subclasses_of_containers_are_an_error(make, name):
    with pytest.raises(TypeError, match=rf"class: {name}.*register_pytree_node\({name}, \.\.\.\)"):
        model(passed)(make(rows()))
    if name != "set":
        with pytest.raises(TypeError, match=rf"class: {name}"):
            model(Partial(lambda x: tree_map_only(NoChunk, lambda n: n.value, make(x))))(rows())


def test_subclasses_of_containers_without_tensors_are_values():
    output = model(passed)((rows(), DictOfTensors(a=1), ListOfTensors([2])))
    assert output[1:] == ({"a": 1}, [2])


def test_what_holds_itself():
    held = ListOfTensors()
    held.append(held)
    x = rows()
    assert model(passed)((x, held))[1] is held
    held.append(x)
    with pytest.raises(TypeError, match="class: ListOfTensors"):
        model(passed)((x, held))


@pytest.mark.parametrize("j", [0, 1])
def test_no_chunk_from_a_layer_is_an_error(j):
    layers = [passed, passed]
    layers[j] = Partial(lambda x: (x, [NoChunk(x)]))
    with pytest.raises(
        TypeError, match=r"in the input.*of: Tensor\); have layers return the value"
    ):
        model(*layers)(rows())


def test_no_chunk_in_no_chunk_is_an_error():
    with pytest.raises(TypeError, match="belongs in the input"):
        model(passed)((rows(), NoChunk(NoChunk(rows()))))
