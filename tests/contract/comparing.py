"""A wrapper beside the plain layers: outputs, losses, gradients and buffers of any structure."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tests.contract.wrapped import assert_same_grads
from tests.support.structures import Apply, gathered, is_whole, leaves_of, scattered
from torchgpipe import NoChunk
from torchgpipe.partition.split import Sequential
from torchgpipe.values.structure import Arguments


def mean_square(output, *targets):
    """A loss of all that has a gradient in an output, which is a mean over rows."""
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and differentiable(x)]
    terms = [(k + 1) * x.abs().square().mean() for k, x in enumerate(found)]
    return sum(terms, torch.zeros(()))


def mean_of_squares(output):
    return output.square().mean()


def differentiable(x):
    return x.is_floating_point() or x.is_complex()


def layers_of(*found):
    """Layers, each of them a module, or a function that gets a weight."""
    return Sequential(*[x if isinstance(x, nn.Module) else Apply(x) for x in found])


def called(layers, value):
    """The output of layers for an input, which may be several arguments."""
    args, kwargs = value if isinstance(value, Arguments) else ((value,), {})
    return layers(*args, **kwargs)


def plain(layers, input, targets, loss, chunks):
    """The loss and the output of the plain layers on micro-batches, one after another."""
    parts = scattered((input, targets), chunks)
    leaves = tree_leaves((input, targets), is_whole)
    rows = next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 0)
    outputs, total = [], 0
    for k, (value, some) in enumerate(parts):
        share = (rows // len(parts) + (k < rows % len(parts))) / rows if rows else 1
        outputs.append(called(layers, value))
        found = loss(outputs[-1], *some) * share
        if found.requires_grad:
            found.backward()
        total = total + found.detach()
    return total, gathered(outputs)


def moved(value, device):
    """A value on a device, with leaves of its own; one tensor in several places stays one."""
    found = {}

    def move(x):
        if isinstance(x, NoChunk):
            return NoChunk(tree_map(move, x.value))
        if not isinstance(x, Tensor):
            return x
        if id(x) not in found:
            found[id(x)] = x.detach().to(device).requires_grad_(x.requires_grad)
        return found[id(x)]

    return tree_map(move, value, is_leaf=is_whole)


def assert_same(found, expected, graph=False):
    """Check that outputs have the same containers, tensors, other objects and, if so, graphs."""
    (leaves, containers), (others, spec) = tree_flatten(found), tree_flatten(expected)
    assert containers == spec
    for a, b in zip(leaves, others):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), equal_nan=True)
            assert a.stride() == b.stride()
            assert not graph or a.requires_grad == b.requires_grad
        else:
            assert a == b


def assert_as_plain(make, layers, input, *targets, loss=mean_square, chunks=2, steps=2, **options):
    """Check that steps of a wrapper do what the plain layers do with its micro-batches.

    Compared are losses, outputs of steps and of calls, gradients of weights and inputs, and
    buffers.

    Returns:
        The wrapped model.
    """
    model = make(layers, loss=loss, chunks=chunks, **options)
    layers.zero_grad()
    input = moved(input, "cpu")
    given = moved(input, model.first)
    aims = moved(targets, model.last)
    for _ in range(steps):
        total, output = plain(layers, input, targets, loss, chunks)
        torch.testing.assert_close(model.step(given, *aims).cpu(), total)
        assert_same(model.output, output, graph=not model.encloses)
    if steps:
        assert_same_grads(model, layers)
        found = model.input_grads(leaves_of(given))
        for own, x in zip(found, leaves_of(input), strict=True):
            assert (own is None) == (x.grad is None)
            if own is not None:
                torch.testing.assert_close(own.cpu(), x.grad)
    assert_same_buffers(model, layers)
    with torch.no_grad():
        assert_same(model.forward(given), plain(layers, input, targets, loss, chunks)[1])
    return model


def assert_same_buffers(model, layers, **tolerance):
    """Check that a wrapped model has the buffers of the plain layers."""
    found = model.buffers
    for name, buffer in layers.named_buffers():
        torch.testing.assert_close(found[name].cpu(), buffer, **tolerance)


def assert_same_parameters(model, layers):
    """Check that a wrapped model has the parameters of the plain layers."""
    found = model.parameters
    for name, x in layers.named_parameters():
        torch.testing.assert_close(found[name].cpu(), x)
