"""Values of any structure, layers that pass them on, and the plain model for them."""

import copy
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from torchgpipe import GPipe, NoChunk, PerMicroBatch

CHUNKS = [1, 2, 3]

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Registered:
    x: Tensor
    mask: Tensor | None
    scale: float = 2.0


torch.export.register_dataclass(Registered)


@dataclass
class Unregistered:
    x: Tensor


class Custom:
    """A registered container that has a label besides its children."""

    def __init__(self, children, label):
        self.children, self.label = children, label


register_pytree_node(
    Custom, lambda c: (c.children, c.label), lambda children, label: Custom(list(children), label)
)


class DictOfTensors(dict):
    pass


class ListOfTensors(list):
    pass


class Apply(nn.Module):
    """A function as a layer, with a weight to train."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, *args, **kwargs):
        return scaled(self.function(*args, **kwargs), self.weight)


def scaled(value, weight):
    return tree_map_only(Tensor, lambda x: x * weight if x.is_floating_point() else x, value)


def passed(value):
    return value


def model(*layers, balance=None, chunks=2, mode="always"):
    layers = [layer if isinstance(layer, nn.Module) else Apply(layer) for layer in layers]
    balance = balance or [1] * len(layers)
    return GPipe(
        nn.Sequential(*layers),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
    )


def is_whole(leaf):
    return isinstance(leaf, NoChunk)


def scattered(value, chunks):
    """Split a value into micro-batches, without the library."""
    leaves, spec = tree_flatten(value, is_whole)
    (rows,) = {len(x) for x in leaves if isinstance(x, Tensor) and x.dim()} or {1}
    parts = max(1, min(rows, chunks))
    return [
        tree_unflatten(
            [
                x.value
                if is_whole(x)
                else x.tensor_split(parts)[i]
                if isinstance(x, Tensor) and x.dim()
                else x
                for x in leaves
            ],
            spec,
        )
        for i in range(parts)
    ]


def gathered(values):
    def join(*leaves):
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if not leaves[0].dim():
            return torch.stack(leaves)
        return torch.cat(leaves) if len(leaves) > 1 else leaves[0]

    return tree_map(join, *map(opened, values))


def opened(value):
    """Put a dimension 0 before each tensor that is marked as one per micro-batch."""

    def marked(x):
        return isinstance(x, PerMicroBatch)

    def one(x):
        return tree_map_only(Tensor, lambda x: x.unsqueeze(0), x.value) if marked(x) else x

    return tree_map(one, value, is_leaf=marked)


def summed(value):
    """Sum each tensor, so that the output of a tensor without rows of its own is legal."""
    return tree_map_only(Tensor, torch.sum, value)


def reference(layers, args, kwargs, chunks):
    """Run the plain layers on the micro-batches, one after another."""
    outputs = []
    first, *rest = layers
    for some, named in scattered((args, kwargs), chunks):
        value = first(*some, **named)
        for layer in rest:
            value = layer(value)
        outputs.append(value)
    return gathered(outputs)


def loss_of(output):
    wanted = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return sum((k + 1) * x.abs().square().sum() for k, x in enumerate(wanted))


def gradients(output, leaves):
    loss = loss_of(output)
    if not isinstance(loss, Tensor):
        return [None] * len(leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def leaves_of(value):
    """The tensors of an input that may have a gradient."""
    return [
        x
        for x in tree_leaves(tree_map_only(NoChunk, lambda x: x.value, value, is_leaf=is_whole))
        if isinstance(x, Tensor) and x.requires_grad
    ]


def verify_same(found, expected):
    """Check that two values have the same containers, tensors and other objects."""
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(expected)
    assert spec == other_spec
    for a, b in zip(leaves, others):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
            assert (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad)
            assert a.stride() == b.stride()
        else:
            assert a == b


def verify(wrapped, *args, steps=1, **kwargs):
    """Check that a wrapper computes the outputs and gradients of its layers without it."""
    plain = copy.deepcopy(wrapped.module)
    for _ in range(steps):
        expected = reference(plain, args, kwargs, wrapped.chunks)
        output = wrapped(*args, **kwargs)
        verify_same(output, expected)
        expected, found = (
            gradients(value, leaves_of((args, kwargs, [*module.parameters()])))
            for value, module in ((expected, plain), (output, wrapped))
        )
        for a, b in zip(found, expected):
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b)
    return output


def rows(n=5, width=3, requires_grad=True):
    return torch.rand(n, width, requires_grad=requires_grad)


def integers(n=5):
    return torch.arange(n)


class Partial(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)
