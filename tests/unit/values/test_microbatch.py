"""Micro-batches: scatter and gather."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.values.marks import NoChunk
from torchgpipe.values.microbatch import Batch, PackedSkip, gather, scatter
from torchgpipe.values.structure import flatten

rows = st.integers(0, 40)
chunks = st.integers(1, 12)


def beside(value, skips, shared=()):
    """A micro-batch with skips."""
    return Batch(value).with_skips(
        {key: PackedSkip(*flatten(x)) for key, x in skips.items()}, shared
    )


@given(rows, chunks)
def test_sizes(rows, chunks):
    sizes = [len(batch[0]) for batch in scatter(torch.empty(rows, 2), chunks)]
    assert len(sizes) == max(1, min(rows, chunks))
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


@given(rows, chunks, st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=3))
def test_gather_is_the_inverse_of_scatter(rows, chunks, shapes):
    tensors = tuple(torch.rand(rows, *shape) for shape in shapes)
    input = tensors or torch.rand(rows)
    output = gather(scatter(input, chunks))
    assert type(output) is type(input)
    for x, y in zip(tensors or (input,), output if tensors else (output,)):
        assert torch.equal(x, y)


def test_different_numbers_of_rows_are_an_error():
    with pytest.raises(ValueError, match=r"same size in dim.*'\[0\]': \(4, 2\), '\[1\]': \(3,\)"):
        scatter((torch.empty(4, 2), torch.empty(3)), 2)


@pytest.mark.parametrize("value", [torch.tensor(1.0), None, NoChunk(torch.empty(2)), {}])
def test_nothing_to_split_is_an_error(value):
    with pytest.raises(ValueError, match="must be an input tensor to split.*chunks: 2"):
        scatter(value, 2)
    (batch,) = scatter(value, 1)
    expected = value.value if isinstance(value, NoChunk) else value
    assert batch.value is expected or batch.value == expected == {}


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 4)], [(2,), ()], [(2,), (2, 1)]])
def test_shapes_that_cannot_be_joined_are_an_error(shapes):
    with pytest.raises(ValueError, match="same shape but for dimension 0.*shapes:"):
        gather([Batch((torch.empty(1), torch.empty(shape))) for shape in shapes])


def test_one_tensor_in_several_places():
    x, y = torch.rand(4, 2), torch.rand(4)
    first, second = scatter((x, y, x), 2)
    assert first.value[0] is first.value[2]
    assert len(first) == 2
    double = second.map(lambda *tensors: [2 * tensor for tensor in tensors], [None])
    assert double.value[0] is double.value[2]
    assert all(map(torch.equal, gather([first, second]), (x, y, x)))


def test_what_goes_whole_is_one_view_of_the_callers():
    """The view is made on the caller's stream, where autograd then adds its gradients."""
    x = torch.rand(2, requires_grad=True)
    for whole in (NoChunk([x, x]), NoChunk((x, NoChunk))):
        values = [batch.value for batch in scatter((torch.rand(4), whole), 2)]
        assert values[0][1][0] is values[1][1][0]
        assert values[0][1][0]._base is x
    first, second = scatter((torch.rand(4), scalar := x.sum().detach().requires_grad_()), 2)
    assert first.value[1] is second.value[1]
    assert first.value[1]._base is scalar


def test_shared_memory():
    x = torch.rand(2, 2)
    assert not Batch(x).shared
    assert not Batch((x, x.clone())).shared
    assert not Batch((x, x)).shared
    assert Batch((x, x[:, :1])).shared == {None}
    assert beside(x, {"a": x.detach(), "b": x + 1}).shared == {None, "a"}
    assert beside(x + 1, {"a": x, "b": x}).shared == {"a", "b"}
    assert Batch((x, x[:, :1])).map(lambda *xs: [x.clone() for x in xs], [None]).shared
    assert beside(x, {"a": x + 1, "b": x + 1}, ["b", "c"]).shared == {"b"}
    assert beside(x, {"a": x}).with_skips({}).shared == {None}


X = torch.empty(1)


@pytest.mark.parametrize(
    "values",
    [
        [(X,), X],
        [(X,), (X, X)],
        [X, [X]],
        [(X, None), (X, X)],
        [{"x": X}, {"y": X}],
        [(X, 1), (X, 1, 1)],
        [[X, 1], [1, X]],
    ],
)
def test_outputs_of_different_structure_are_an_error(values):
    for some in (values, values[::-1]):
        with pytest.raises(ValueError, match="same structure.*micro-batch 0: .*Tensor.*batch 1: "):
            gather([Batch(value) for value in some])


@pytest.mark.parametrize(("a", "b"), [(1, 2), ("a", None), (1, True), (object, int)])
def test_outputs_that_differ_are_an_error(a, b):
    message = rf"output: \['n'\], micro-batch 0: {re.escape(repr(a))}, micro-batch 2: "
    with pytest.raises(ValueError, match=message + re.escape(repr(b))):
        gather([Batch({"x": X, "n": n}) for n in (a, a, b)])


def test_not_a_number_is_itself():
    assert math.isnan(gather([Batch((X, float("nan"))), Batch((X, float("nan")))])[1])


class Array:
    def __eq__(self, other):
        return torch.ones(2) == torch.ones(2)


def test_outputs_that_cannot_tell_whether_they_differ():
    array = Array()
    assert gather([Batch((X, array))] * 2)[1] is array
    with pytest.raises(ValueError, match=r"no tensors must be equal.*output: \[1\]"):
        gather([Batch((X, Array())), Batch((X, Array()))])


def test_outputs_of_a_device_that_autocast_does_not_know():
    parts = [Batch(torch.empty(2, 3, device="meta")) for _ in range(2)]
    assert gather(parts).shape == (4, 3)
