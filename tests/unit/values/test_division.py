"""A division: what each micro-batch gets of a mini-batch."""

from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nested import nested_tensor
from torch.utils._pytree import tree_structure

from tests.support.structures import Point
from torchgpipe import Chunk, Chunks, NoChunk
from torchgpipe.values import division as division_of_values
from torchgpipe.values.division import Division, FlatInput, row_count
from torchgpipe.values.microbatch import Batch, scatter

X, Y = torch.arange(4.0), torch.arange(8.0).view(4, 2)
IMAGES = [torch.rand(3, k + 1) for k in range(4)]


def parts(value, chunks):
    flat = FlatInput(value)
    return [*flat.split(flat.division(chunks))]


def test_one_tensor_in_two_places_stays_one_after_a_split():
    for a, b in parts((X, X), 2):
        assert a is b


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2))
def test_rows_of_any_dimension_come_back_in_order(rows, chunks, dim):
    shape = [2, 3]
    shape.insert(dim, rows)
    value = torch.arange(6.0 * rows).view(shape)
    found = parts((torch.zeros(rows), Chunk(value, dim)), chunks)
    assert torch.equal(torch.cat([x for _, x in found], dim), value)
    assert len(found) == min(rows, chunks)


#: What an input may have in it beside a tensor with six rows; of lists, fewer than there are rows.
LEAVES = st.sampled_from(
    [
        *(lambda: torch.rand(6), lambda: torch.rand(6, 2), lambda: torch.tensor(2.0)),
        *(lambda: Chunk(torch.rand(2, 6), 1), lambda: NoChunk(torch.rand(3)), lambda: "text"),
        *(lambda: NoChunk([torch.rand(2), None]), lambda: None, lambda: 3, lambda: torch.float16),
    ]
).map(lambda make: make())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
    ),
    max_leaves=8,
)


def rows_of(value, start, size):
    """The rows of a micro-batch, one leaf after another."""
    if isinstance(value, NoChunk):
        return value.value
    if isinstance(value, Chunk):
        return value.value.narrow(value.dim, start, size)
    if isinstance(value, torch.Tensor):
        return value[start : start + size] if value.dim() else value
    if isinstance(value, dict):
        return {key: rows_of(x, start, size) for key, x in value.items()}
    if isinstance(value, Point):
        return Point(*[rows_of(x, start, size) for x in value])
    if isinstance(value, list | tuple):
        return type(value)([rows_of(x, start, size) for x in value])
    return value


@given(VALUES, st.integers(1, 7))
def test_micro_batches_have_the_rows_of_each_leaf(value, chunks):
    value = (torch.rand(6), value)
    flat = FlatInput(value)
    assert len(flat.names) == len(flat.leaves)
    division = flat.division(chunks)
    starts = [sum(division.sizes[:i]) for i in range(division.m)]
    by_leaves = [Batch(leaves, flat.spec) for leaves in flat.parts(division)]
    for i, (found, batch) in enumerate(zip(flat.split(division), by_leaves, strict=True)):
        expected = Batch(rows_of(value, starts[i], division.sizes[i]))
        for same in (Batch(found), batch):
            assert same.structures[None].equals(expected.structures[None])
            assert all(map(torch.equal, same.parts[None], expected.parts[None]))


def test_an_input_is_flattened_once(monkeypatch):
    walks = []
    flattened = division_of_values.flatten_tree
    monkeypatch.setattr(
        division_of_values,
        "flatten_tree",
        lambda value, test: walks.append(value) or flattened(value, test),
    )
    for value, count in ((X, 1), ({"x": X, "y": (Y, None, 3)}, 1), ({"x": X, "y": ["a"]}, 2)):
        walks.clear()
        assert len(scatter(value, 2)) == 2
        assert len(walks) == count


@pytest.mark.parametrize(
    "value",
    [
        IMAGES,
        # The objects in each image, of which some may have as many as there are rows.
        [{"boxes": x, "size": Y, "id": 3} for x in IMAGES],
        [UserDict(boxes=x) for x in IMAGES],
    ],
)
def test_list_with_an_entry_for_each_row_is_split_as_a_list(value):
    found = parts((X, value), 2)
    assert [entries for _, entries in found] == [value[:2], value[2:]]


@pytest.mark.parametrize(
    "other",
    [
        [{"boxes": x} for x in IMAGES],
        [{"boxes": Y}, {}, None, {"id": 3}],
        [Y[:1]] * 4,
        ["one", "two", "three", "four"],
        [1, 2, 3, 4],
        [None] * 4,
    ],
)
def test_two_lists_of_one_length_tell_the_rows(other):
    value = {"images": IMAGES, "more": (other, [8, 8], {"scale": 2.0})}
    sizes = FlatInput(value).division(3)
    assert (sizes.sizes, sizes.is_varied, sizes.is_listed) == ([2, 1, 1], True, True)
    found = parts(value, 3)
    assert [x["images"] for x in found] == [IMAGES[:2], IMAGES[2:3], IMAGES[3:]]
    assert [x["more"] for x in found] == [
        (part, [8, 8], {"scale": 2.0}) for part in (other[:2], other[2:3], other[3:])
    ]


@pytest.mark.parametrize(
    "value",
    [
        *([X, X], (X, [X, X]), {"a": [Y] * 4}, (X, (X,) * 4), (X, [{"a": X}, {}, {}, {}])),
        *(([X] * 3, [Y] * 3), ([Y] * 5, [torch.tensor(2.0)] * 5)),
    ],
)
def test_other_containers_of_tensors_are_split_within(value):
    found = parts(value, 2)
    assert row_count(value) == 4
    assert tree_structure(found[0]) == tree_structure(value)


def test_marks_say_that_mappings_in_a_list_are_no_rows():
    value = X, [{"x": X, "more": {"whole": NoChunk(Y)}}, *({"x": X} for _ in range(3))]
    for _, (first, *_) in parts(value, 2):
        assert len(first["x"]) == 2
        assert first["more"]["whole"] is Y


def test_the_caller_divides():
    value = {"x": Chunks([X, None, 3]), "y": Chunks([[X], [Y], []])}
    assert FlatInput(value).division(8) == Division([0, 0, 0], True)
    assert FlatInput(value).division(8).is_ready
    assert [part["x"] for part in parts(value, 1)] == [X, None, 3]
    assert [len(part["y"]) for part in parts(value, 1)] == [1, 1, 0]


def test_the_caller_divides_something():
    division = FlatInput((Chunks(["a", "b", "c"]), X)).division(1)
    assert (division.sizes, division.is_given, division.is_ready) == ([2, 1, 1], True, False)
    assert [x.tolist() for _, x in parts((Chunks(["a", "b", "c"]), X), 1)] == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((Chunks([1, 2]), Chunks([1, 2, 3])), "same length.*lengths: "),
        ((Chunks([1] * 5), X), "rows: 4, micro-batches: 5"),
        ((X, Chunk(Y, 1)), r"same size in dimension 0.*Chunk\(tensor, dim=1\)"),
        ((X, [*IMAGES, X]), "same size in dimension 0.*Chunks"),
        (([X, Y[0]], ["a", "b", "c"]), "same size in dimension 0.*Chunks"),
        ((tuple(IMAGES[:1]), ({"boxes": Y},)), "same size in dimension 0.*Chunks"),
        (nested_tensor([X, Y[0]], layout=torch.jagged), r"layout: nested\).*Chunks"),
    ],
)
def test_what_cannot_be_divided(value, text):
    with pytest.raises(ValueError, match=text):
        FlatInput(value).division(2)


def test_marks_within_marks():
    with pytest.raises(TypeError, match=r"within Chunks.*marks: \['NoChunk'\]"):
        Chunks([[NoChunk(X)], X])
    with pytest.raises(TypeError, match="not within another mark"):
        scatter((X, NoChunk([NoChunk(X)])), 2)


def test_a_list_of_numbers_goes_whole():
    scales = [torch.tensor(float(k)) for k in range(4)]
    assert all(part[1] == scales for part in parts((X, scales), 2))
