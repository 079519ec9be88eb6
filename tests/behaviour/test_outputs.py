"""Outputs are those of the plain model: joined, of the same kind, with gradients."""

import pytest
import torch
from torch import nn

from tests.support.structures import Partial, Point, model, passed, rows, verify
from torchgpipe import GPipe, PerMicroBatch

# Joining.


@pytest.mark.parametrize(
    ("function", "name", "a", "b"),
    [
        (lambda x: (x, len(x)), r"\[1\]", "3", "2"),
        (lambda x: {"x": x, "n": [None, str(len(x))]}, r"\['n'\]\[1\]", "'3'", "'2'"),
        (lambda x: Point(x, len(x) > 2), "y", "True", "False"),
        (lambda x: len(x), "the value", "3", "2"),
    ],
)
def test_other_outputs_that_differ_are_an_error(function, name, a, b):
    wrapped = model(passed, Partial(function))
    with pytest.raises(
        ValueError, match=rf"equal for all .*output: {name}, micro-batch 0: {a}, micro-batch 1: {b}"
    ):
        wrapped(rows())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x,) * len(x), "same structure.*micro-batch 0: .*Tensor.*micro-batch 1: "),
        (lambda x: (x, x if len(x) > 2 else None), "same structure.*NoneType"),
        (lambda x: {str(len(x)): x}, r"same structure.*'3'.*'2'"),
        (lambda x: x.t(), r"same multiple of the rows.*\(3, 3\), \(3, 2\)\], rows: \[3, 2\]"),
        (
            lambda x: x @ x.T,
            r"shape but for dimension 0.*\(3, 3\), \(2, 2\).*after the wrapper",
        ),
        (
            lambda x: x if len(x) > 2 else x.sum(),
            "shape but for dimension 0.*pad them.*Chunks",
        ),
    ],
)
def test_outputs_that_cannot_be_joined_are_an_error(function, message):
    with pytest.raises(ValueError, match=message):
        model(passed, function)(rows())


def test_other_outputs_alone():
    assert model(passed, Partial(lambda x: None))(rows()) is None
    assert model(passed, Partial(lambda x: {"a": "b"}))(rows()) == {"a": "b"}


# Rows and what is none.


class Recurrent(nn.Module):
    """A layer that returns a function of the state of an LSTM, whose rows are in dimension 1."""

    def __init__(self, function):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)
        self.function = function

    def forward(self, x):
        output, (h, c) = self.lstm(x)
        return output, self.function(h), c.transpose(0, 1)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_rows_in_another_dimension_are_an_error(count, mode):
    x = torch.rand(count, 4, 3)
    wrapped = model(nn.Identity(), Recurrent(lambda h: h), chunks=2, mode=mode)
    with pytest.raises(
        ValueError, match=r"same multiple of the rows.*output: \[1\], shapes: \[\(1"
    ):
        wrapped(x)
    wrapped = model(nn.Identity(), Recurrent(lambda h: h.transpose(0, 1)), chunks=2, mode=mode)
    assert verify(wrapped, x)[1].shape == (count, 1, 2)


@pytest.mark.parametrize("count", [4, 6, 7, 9])
def test_matrix_that_has_no_rows_is_an_error(count):
    wrapped = model(nn.Linear(3, 5), lambda x: {"x": x, "m": x.T @ x}, chunks=2)
    with pytest.raises(ValueError, match=r"output: \['m'\], shapes: \[\(5, 5\), \(5, 5\)\]"):
        wrapped(torch.rand(count, 3))


def test_fewer_rows_are_an_error_unless_stacked():
    """Pairs of rows are whole only where each micro-batch has an even number of them."""
    x = rows(8)
    with pytest.raises(ValueError, match=r"shapes: \[\(2, 3\), \(2, 3\)\], rows: \[4, 4\]"):
        model(passed, lambda x: x[::2] * x[1::2], chunks=2)(x)
    output = model(lambda x: PerMicroBatch(x[::2] * x[1::2]), chunks=2)(x)
    assert output.shape == (2, 2, 3)


def test_one_row_for_each_micro_batch_tells_nothing():
    """Five rows for each row, or a matrix: nobody knows. One chunk has nothing to join."""
    assert model(nn.Linear(3, 5), lambda x: x.T @ x, chunks=2)(rows(2)).shape == (10, 5)
    assert model(nn.Linear(3, 5), lambda x: x.T @ x, chunks=1)(rows(4)).shape == (5, 5)


def test_marked_ones_of_several_shapes_are_an_error():
    with pytest.raises(ValueError, match=r"marked by PerMicroBatch.*\(3, 3\), \(2, 3\)"):
        model(lambda x: PerMicroBatch(x), chunks=2)(rows(5))


def test_marked_inputs_are_an_error():
    with pytest.raises(TypeError, match="PerMicroBatch marks outputs.*NoChunk"):
        GPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], chunks=2)([PerMicroBatch(rows())])
