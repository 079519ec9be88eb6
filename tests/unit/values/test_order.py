"""Outputs with several rows for each row can be joined side by side, and not in blocks."""

import pytest
import torch
from torch import nn

from tests.support.helpers import CPUS
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.values.order import Order

#: Functions of rows whose results have all rows of one view in front of those of the next.
IN_BLOCKS = {
    "cat": lambda x: torch.cat([x, x.flip(1)]),
    "vstack": lambda x: torch.vstack((x, x, x)),
    "repeat": lambda x: x.repeat(2, 1),
    "tile": lambda x: x.tile(3, 1),
    "stack": lambda x: torch.stack([x, x + 1]).flatten(0, 1),
    "stack and view": lambda x: torch.stack([x, x + 1], dim=0).view(-1, 4),
    "sequence first": lambda x: x.unsqueeze(0).expand(5, -1, -1).reshape(-1, 4),
    "cat of chunks": lambda x: torch.cat(torch.cat([x, x]).chunk(2)),
    "columns of a cat": lambda x: torch.cat([x, x.flip(1)]).unsqueeze(1)[:, 0],
    "cat of parts": lambda x: torch.cat(torch.stack([x, -x], 1).unbind(1)),
    "halves of rows of a cat": lambda x: torch.cat([x, -x]).view(-1, 2).repeat(1, 2),
    "cat of several for each": lambda x: torch.cat([x.repeat_interleave(2, 0)] * 2),
}


def order_of(x, count):
    """The places of blocks of rows, side by side."""
    return torch.arange(count * len(x)).view(count, -1).t().reshape(-1)


def in_order(x, count):
    return torch.index_select(x, 0, order_of(x[: len(x) // count], count))


#: Functions whose results are the rows of the input, or have several for each side by side.
JOINABLE = {
    "repeat_interleave": lambda x: x.repeat_interleave(3, 0),
    "stack": lambda x: torch.stack([x, x + 1], 1).flatten(0, 1),
    "stack and transpose": lambda x: torch.stack([x, x + 1]).transpose(0, 1).flatten(0, 1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 4),
    "a part of a cat": lambda x: torch.cat([x, x + 1]).chunk(2)[1],
    "cat, and expand": lambda x: (
        torch.cat([x, x]).chunk(2)[0].unsqueeze(1).repeat(1, 2, 1).view(-1, 4)
    ),
    "cat for each row": lambda x: torch.cat([row.topk(3).values[:, None] for row in x]).expand(
        -1, 4
    ),
    "stack for each row": lambda x: torch.cat([torch.stack([row, row * 2]) for row in x]),
    "vstack for each row": lambda x: torch.vstack([torch.stack([row, -row]) for row in x]),
    "repeat, put in order": lambda x: in_order(x.repeat(3, 1), 3),
    "cat, put in order": lambda x: in_order(torch.cat([x, -x]), 2),
    "cat, indexed": lambda x: torch.cat([x, -x])[order_of(x, 2)],
    "repeat of columns": lambda x: x.view(-1, 2).repeat(1, 2),
    "cat of columns": lambda x: torch.cat([x, x], 1).view(-1, 4),
}


class Views(nn.Module):
    """A layer after a function of rows."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.function(x))


def wrapped(kind, layers):
    """A function that calls a wrapper."""
    if kind == "MappedGPipe":
        return MappedGPipe(layers, {"": "cpu"}, chunks=4)
    if kind == "GPipe":
        return GPipe(layers, [3], devices=CPUS[:1], chunks=4)
    model = GPipe(layers, [1, 1, 1], devices=CPUS[:3], chunks=4)
    if kind == "GPipe of partitions":
        return model
    training = ScheduledLoss(model, lambda y: y.square().mean(), outputs=True)
    return lambda x: training(x)[1]


KINDS = ["GPipe", "GPipe of partitions", "MappedGPipe", "ScheduledLoss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_rows_in_blocks_are_an_error(name, kind):
    layers = nn.Sequential(nn.Linear(4, 4), Views(IN_BLOCKS[name]), nn.Linear(4, 4))
    model = wrapped(kind, layers)
    with pytest.raises(ValueError, match=r"side by side.*rows: \[3, 2, 2, 2\]\); have the model"):
        model(torch.rand(9, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", JOINABLE)
def test_rows_side_by_side_are_joined(name, kind):
    layers = nn.Sequential(nn.Linear(4, 4), Views(JOINABLE[name]), nn.Linear(4, 4))
    x = torch.rand(9, 4)
    torch.testing.assert_close(wrapped(kind, layers)(x), layers(x))


@pytest.mark.parametrize("training", [True, False])
def test_the_remedies_are_some(training):
    """The model gives what the plain one does once it does as the message says."""
    x = torch.rand(9, 4)
    for function in (lambda x: torch.cat([x, -x]).chunk(2), lambda x: (torch.stack([x, -x], 1),)):
        layer = nn.Sequential(nn.Linear(4, 4), Tuple(function)).train(training)
        found = wrapped("GPipe", nn.Sequential(*layer, nn.Identity())).train(training)(x)
        torch.testing.assert_close(found, layer(x))


class Tuple(nn.Module):
    """A layer that returns what a function returns."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_nobody_watches_layers_that_return_as_many_rows_or_are_compiled():
    x, layer = torch.rand(4, 2), nn.Linear(2, 2)
    modes = []

    def call(order, result):
        with order.begin((x,)):
            modes.append(torch._C._len_torch_function_stack())
        order.end((x,), (result,))

    order, other = Order(layer), Order(layer)
    for _ in range(2):
        call(order, x)
    layer.compile(backend="eager")
    for _ in range(2):
        call(other, x.repeat(2, 1))
    assert modes == [0] * 4
    assert order.known
    assert other.known


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 5])
def test_weights_that_are_joined_have_no_rows(rows, kind):
    """By chance as many as the rows that come out of it."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(2, 4))

        def forward(self, x):
            return nn.functional.linear(x.repeat_interleave(4, 0), torch.cat([self.a, self.b]))

    layers = nn.Sequential(nn.Linear(4, 4), Joined(), nn.Linear(4, 4))
    x = torch.rand(rows, 4)
    torch.testing.assert_close(wrapped(kind, layers)(x), layers(x))


@pytest.mark.parametrize("kind", ["GPipe", "GPipe of partitions"])
def test_empty_tensors_beside_rows_in_blocks(kind):
    layers = [Tuple(lambda x: (x[:0], torch.cat([x, -x]))), nn.Identity(), nn.Identity()]
    with pytest.raises(ValueError, match="side by side"):
        wrapped(kind, nn.Sequential(*layers))(torch.rand(9, 4))
