"""Micro-batches that the caller has made."""

import re

import torch
from torch import nn

from tests.contract.promises import promise
from tests.contract.wrapped import assert_same_grads, linears
from torchgpipe import Chunk, Chunks


def accumulated(layers, inputs, targets):
    """Gradient accumulation: the loss is the mean of those of the micro-batches."""
    total = 0
    for x, y in zip(inputs, targets):
        loss = nn.functional.mse_loss(layers(x), y) / len(inputs)
        loss.backward()
        total = total + loss.detach()
    return total


def made(model, lengths):
    """Micro-batches of sequences, each of a length of its own."""
    pairs = [torch.rand(2, 2, length, 6) for length in lengths]
    inputs, targets = [[pair[k] for pair in pairs] for k in range(2)]
    marked = Chunks(x.to(model.first) for x in inputs), Chunks(y.to(model.last) for y in targets)
    return inputs, targets, marked


@promise(
    "Micro-batches of any shapes, as Chunks, train as a loop that accumulates gradients does.",
    modes=True,
    devices=True,
)
def ready(make):
    layers = linears(6, 8, 6)
    model = make(layers)
    # Other lengths, and other numbers of micro-batches, step by step; the third knows the first.
    for lengths in ([3, 5, 2, 4], [1, 6], [3, 5, 2, 4], [2, 2, 2, 2, 2, 2]):
        inputs, targets, marked = made(model, lengths)
        expected = accumulated(layers, inputs, targets)
        torch.testing.assert_close(model.step(*marked).cpu(), expected)
        assert_same_grads(model, layers)


@promise("Where all tensors come as Chunks, a list of outputs returns.")
def listed(make):
    layers = linears(6, 8, 6)
    model = make(layers)
    for lengths in ([3, 5, 2], [4]):
        inputs, _, (marked, _) = made(model, lengths)
        found = model.forward(marked)
        assert [x.shape for x in found] == [x.shape for x in inputs]
        for x, y in zip(inputs, found):
            torch.testing.assert_close(y.detach(), layers(x).detach())


class Added(nn.Module):
    """A layer that takes what was divided, and a tensor with its rows in another dimension."""

    def forward(self, value):
        x, others, positions = value
        extra = torch.stack([sum(row.sum() for row in some) for some in [others]])
        return x + extra + positions.sum(0).unsqueeze(-1)


@promise("Rows may be in another dimension (Chunk), and in a list with a tensor for each row.")
def rows_elsewhere(make):
    layers = nn.Sequential(Added(), nn.Linear(6, 6))
    model = make(layers, chunks=3)
    x, y = torch.rand(2, 6, 6)
    rows = [torch.rand(k + 1) for k in range(6)]
    positions = torch.rand(3, 6)
    total = 0
    for k in range(0, 6, 2):
        part = slice(k, k + 2)
        value = x[part], rows[part], positions[:, part]
        loss = nn.functional.mse_loss(layers(value), y[part]) / 3
        loss.backward()
        total = total + loss.detach()
    found = model.step((x, rows, Chunk(positions, dim=1)), y)
    torch.testing.assert_close(found, total)
    assert_same_grads(model, layers)


class Scaled(nn.Module):
    """A layer that passes images of several sizes on, with the objects in each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, value):
        images, objects = value
        return [x * self.weight for x in images], objects


class Found(nn.Module):
    """A layer that makes a row of each image and its objects."""

    def forward(self, value):
        rows = [x.mean(0) * one["boxes"].sum() for x, one in zip(*value, strict=True)]
        return torch.stack(rows)


@promise("Two lists of one length are rows where no tensor beside them is: images, and objects.")
def lists(make):
    layers = nn.Sequential(Scaled(), Found(), nn.Linear(6, 6))
    model = make(layers, chunks=3)
    y = torch.rand(7, 6)
    images = [torch.rand(k % 3 + 1, 6) for k in range(7)]
    objects = [{"boxes": torch.rand(k % 4 + 1), "id": k} for k in range(7)]
    total = 0
    for part in (slice(3), slice(3, 5), slice(5, 7)):
        share = len(y[part]) / 7
        loss = nn.functional.mse_loss(layers((images[part], objects[part])), y[part]) * share
        loss.backward()
        total = total + loss.detach()
    torch.testing.assert_close(model.step((images, objects), y), total)
    assert_same_grads(model, layers)


@promise("What is not marked is divided into as many micro-batches as Chunks has.")
def some_ready(make):
    layers = nn.Sequential(Pair(), nn.Linear(6, 6))
    model = make(layers, chunks=1)
    x, y = torch.rand(2, 7, 6)
    factors = [0.5, None, 2.0]
    sizes = [3, 2, 2]
    total = 0
    for part, target, factor in zip(x.split(sizes), y.split(sizes), factors):
        share = len(part) / 7
        loss = nn.functional.mse_loss(layers((part, factor)), target) * share
        loss.backward()
        total = total + loss.detach()
    torch.testing.assert_close(model.step((x, Chunks(factors)), y), total)
    assert_same_grads(model, layers)


class Pair(nn.Module):
    """A layer that takes a tensor beside an object, which may be none."""

    def forward(self, value):
        x, factor = value
        return x if factor is None else x * factor


@promise("An input without values, on the meta device, is an error that says so; a target, too.")
def without_values(make):
    model = make(linears(6, 6, 6))
    x, y = torch.rand(2, 4, 6)
    for pair in ((x.to("meta"), y), (x, y.to("meta")))[: 1 + model.encloses]:
        error = model.raised(model.loss, *pair)
        assert error.kind == "ValueError"
        assert re.search(r": meta.*\); (make|pass) ", error.text)


@promise("Chunks of different lengths, and fewer rows than Chunks, are errors that say so.")
def wrong_lengths(make):
    model = make(linears(6, 6, 6))
    x = torch.rand(4, 6)
    for value in ((Chunks([x, x]), Chunks([1, 2, 3])), (Chunks([1] * 5), x)):
        error = model.raised(model.forward, value)
        assert error.kind == "ValueError"
        assert "Chunks" in error.text
