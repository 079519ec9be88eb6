"""The marks: what they take, and what they refuse."""

import pytest
import torch

from torchgpipe import Chunk, Chunks, NoChunk
from torchgpipe.values.structure import is_of_input

X = torch.arange(12.0).view(3, 4)


def test_negative_dimension_counts_from_the_last():
    assert Chunk(X, dim=-1).dim == 1
    assert Chunk(X, dim=0).dim == 0


@pytest.mark.parametrize(("dim", "shape"), [(2, (3, 4)), (-3, (3, 4)), (0, ())])
def test_dimension_that_a_tensor_lacks(dim, shape):
    with pytest.raises(ValueError, match=rf"\(dim: {dim}, shape: "):
        Chunk(torch.zeros(shape), dim=dim)


@pytest.mark.parametrize(("value", "dim"), [([X], 0), (X, True), (X, 1.0), (X, None)])
def test_chunk_marks_a_tensor(value, dim):
    with pytest.raises(TypeError, match="Chunk marks a tensor"):
        Chunk(value, dim)


@pytest.mark.parametrize("values", [X, {"a": X}, "text", 3, None])
def test_chunks_marks_a_list(values):
    with pytest.raises(TypeError, match=rf"values: {type(values).__name__}\)"):
        Chunks(values)


def test_no_micro_batch():
    with pytest.raises(ValueError, match="entries: 0"):
        Chunks([])
    with pytest.raises(ValueError, match="batches: 0"):
        Chunks.of([])


def test_chunks_of_keyword_arguments():
    found = Chunks.of([{"x": X, "n": 1}, {"n": 2, "x": None}])
    assert {key: x.value for key, x in found.items()} == {"x": [X, None], "n": [1, 2]}


def test_keyword_arguments_that_differ():
    with pytest.raises(ValueError, match=r"keys: \[\['x'\], \['x', 'y'\]\]"):
        Chunks.of([{"x": 1}, {"x": 1, "y": 2}])
    with pytest.raises(TypeError, match=r"entries: \['Tensor'\]"):
        Chunks.of([{"x": 1}, X])


@pytest.mark.parametrize("mark", [NoChunk([X, None]), Chunk(X, 1), Chunks([[X], None])])
def test_map_keeps_the_mark(mark):
    def doubled(x):
        return x if x is None else x * 2

    found = mark.map(doubled)
    assert type(found) is type(mark)
    assert is_of_input(found)
    assert "8." in repr(found)
    assert repr(found) != repr(mark)
