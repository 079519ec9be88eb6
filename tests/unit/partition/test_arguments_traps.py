"""Warnings about what is allowed and seldom meant: each once per wrapper, and none without need."""

import copy
import warnings
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.support import helpers
from tests.support.helpers import wrap
from tests.support.structures import Point, Registered
from torchgpipe import Chunks, GPipe, NoChunk


def messages(function):
    """The warnings that a function gives, as they come with Python's default filters."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    assert all(x.category is UserWarning for x in found)
    # Each warning names a line of the tests, not one of PyTorch or of torchgpipe.
    assert {x.filename for x in found} <= {__file__, helpers.__file__}
    return [str(x.message) for x in found]


# Layers for which dimension 0 is the sequence.


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)


SEQUENCE_FIRST = {
    "1 (RNN)": lambda: nn.RNN(4, 4),
    "1 (LSTM)": lambda: nn.LSTM(4, 4),
    "1 (GRU)": lambda: nn.GRU(4, 4),
    "1 (MultiheadAttention)": lambda: nn.MultiheadAttention(4, 2),
    "1 (TransformerEncoderLayer)": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "1 (TransformerDecoderLayer)": lambda: nn.TransformerDecoderLayer(4, 2, 8),
    "1 (TransformerEncoder)": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8), 12, enable_nested_tensor=False
    ),
    "1 (Transformer)": lambda: nn.Transformer(4, 2, 1, 1, 8),
    "1.attention (MultiheadAttention)": Transposed,
    "1.0 (GRU), 1.1.0 (LSTM)": lambda: nn.Sequential(
        nn.GRU(4, 4), nn.ModuleList([nn.LSTM(4, 4)]), nn.LSTM(4, 4, batch_first=True)
    ),
}


@pytest.mark.parametrize("named", SEQUENCE_FIRST)
def test_sequence_first(named):
    with warnings.catch_warnings():
        # Of nn.Transformer about batch_first.
        warnings.simplefilter("ignore")
        layer = SEQUENCE_FIRST[named]()
    (found,) = messages(lambda: wrap([nn.Linear(4, 4), layer], chunks=2))
    assert f"(layers: {named}, chunks: 2)" in found
    assert "batch_first=True" in found
    assert "warnings.filterwarnings('ignore', 'GPipe splits dimension 0')" in found


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(4, 4, batch_first=True),
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
        lambda: nn.LSTMCell(4, 4),
    ],
)
def test_batch_first(layer):
    assert messages(lambda: wrap([layer()], chunks=2)) == []


def test_sequence_first_matters_with_several_micro_batches():
    model = wrap([nn.GRU(4, 4)], chunks=1)

    def change():
        model.chunks = 2
        model.chunks = 3
        copy.deepcopy(model).chunks = 4

    assert len(messages(change)) == 1


# Lists and arrays.


class First(nn.Module):
    def forward(self, x, *others, **named):
        return x


X = torch.rand(4, 2)


class Options(NamedTuple):
    a: int
    b: int
    c: int
    d: int


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        "text",
        b"byte",
        {"a": 1, "b": 2, "c": 3, "d": 4},
        {1, 2, 3, 4},
        torch.Size([1, 2, 3, 4]),
        (X, X, X, X),
        [X, X, X],
        # It is divided, and a list in it comes with its row.
        [UserDict(boxes=torch.ones(k)) for k in range(4)],
        [{"boxes": torch.ones(k), "names": [*"abcd"]} for k in range(4)],
        [NoChunk(X), 1, 2, 3],
        NoChunk([1, 2, 3, 4]),
        Options(1, 2, 3, 4),
        [None] * 4,
        (None,) * 4,
        None,
        0.5,
    ],
    ids=str,
)
def test_what_is_no_list_of_rows(value):
    assert messages(lambda: wrap([First()], chunks=2)(X, value)) == []


def test_lists_within_any_container_are_named():
    entries = [*"abcd"]
    for value, path in ((Point(X, entries), ".y"), (Registered(X, entries), ".mask")):
        (found,) = messages(lambda value=value: wrap([First()], chunks=2)(X, value))
        assert f"(input: args[1]{path}, entries: 4, micro-batches: 2)" in found


@pytest.mark.parametrize(
    ("rows", "value"),
    [(2, (3, 4)), (3, [3, 4, 5]), (4, nn.ModuleList(nn.Identity() for _ in range(4)))],
)
def test_shapes_and_modules_are_no_rows(rows, value):
    assert messages(lambda: wrap([First()], chunks=2)(X[:rows], value)) == []


# Rows that are compared with each other.


class Compared(nn.Module):
    def forward(self, x):
        return x @ x.T


def coupled(rows, size=8, chunks=2, layers=()):
    model = wrap([*layers, Compared()], chunks=chunks)
    x = torch.rand(rows, size)
    # Outputs of uneven micro-batches cannot be joined.
    found = messages(lambda: [model(x), model(x)])
    return [message for message in found if "leaves devices idle" not in message]


@pytest.mark.parametrize(
    "case",
    [
        {"rows": 6, "chunks": 1},
        {"rows": 2},
        {"rows": 6, "size": 3},
        {"rows": 6, "layers": [nn.Linear(8, 3), nn.Linear(3, 8)]},
    ],
    ids=str,
)
def test_what_compares_no_rows_or_may_have_its_size_from_elsewhere(case):
    assert coupled(**case) == []


# Fewer micro-batches than devices.


def linears(partitions=2):
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(partitions)])


def test_idle_devices_without_grad():
    model = GPipe(linears(), [1, 1], devices=["cpu"] * 2)
    with torch.no_grad():
        assert messages(lambda: model(X)) == []
    model.chunks = 2
    # The rest of an epoch says nothing.
    assert messages(lambda: [model(X), model(X[:1])]) == []
    model.chunks = 1
    assert len(messages(lambda: [model(X), model(X)])) == 1


@pytest.mark.parametrize(
    ("chunks", "input", "share", "change"),
    [
        (1, X, "67%", "set model.chunks, for a start to"),
        (8, X[:2], "50%", "several mini-batches, marked by Chunks"),
        (8, Chunks([X[:1]] * 2), "50%", "pass more in one call"),
    ],
)
def test_idle_devices(chunks, input, share, change):
    model = GPipe(linears(3), [1, 1, 1], devices=["cpu"] * 3, chunks=chunks)
    (message,) = messages(lambda: model(input))
    assert f"idle for {share}" in message
    assert change in message
