"""Exceptions of a layer's own backward name partition, micro-batch and layer."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.contract.layers import Pop
from tests.support.helpers import note_of
from torchgpipe import GPipe, MappedGPipe
from torchgpipe.skip import skippable, stash


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.fail:
            raise ctx.fail
        return 2 * x * grad, None


class Square(nn.Module):
    fail = None
    nodes = ()
    inner = False

    def forward(self, x):
        x = x.cos()
        if self.inner:
            return checkpoint(lambda y: y.sin(), Fails.apply(x, self.fail), use_reentrant=False)
        output = Fails.apply(x, self.fail)
        if output.grad_fn is not None:
            self.nodes = [*self.nodes, weakref.ref(output.grad_fn)]
        return output.sin()


def made(mode="never", chunks=2):
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Square(), nn.Linear(4, 4))
    return GPipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=chunks, checkpoint=mode)


NOTE = "raised in partition 1, micro-batch 1, layer 2 (Square), in its backward"


def mapped(mode):
    layers = [*made().module]
    return MappedGPipe(nn.Sequential(*layers), {"": "cpu"}, chunks=2, checkpoint=mode)


@pytest.mark.parametrize("wrap", [made, mapped])
def test_note_within_a_checkpoint_of_pytorch(mode, wrap):
    """Once the partition has learned, and before, and after an evaluation without gradients."""
    model = wrap(mode)
    layer = model.module[2]
    layer.inner = True
    with torch.no_grad():
        model(torch.rand(4, 4))
    for _ in range(2):
        layer.fail = error = ValueError("x")
        with pytest.raises(ValueError, match="x"):
            model(torch.rand(4, 4)).sum().backward()
        place = "the model on cpu, micro-batch 1, in its backward"
        assert note_of(error) == (NOTE if wrap is made else f"raised in {place}")
        layer.fail = None
        model(torch.rand(4, 4)).sum().backward()


def test_functions_of_the_caller_have_no_note():
    model = made(chunks=1)
    error = ValueError("x")
    x = Fails.apply(torch.rand(4, 4, requires_grad=True), error)
    with pytest.raises(ValueError, match="x"):
        model(x).sum().backward()
    assert not getattr(error, "__notes__", ())
    assert error.__cause__ is None


def test_graph_of_another_micro_batch():
    """A node that a layer meets again keeps the note of the cell that made it."""

    class Recurrent(nn.Module):
        before = 0
        fail = ValueError("x")

        def forward(self, x):
            x = x + self.before
            self.before = Fails.apply(x, self.fail)
            self.fail = None
            return self.before

    layer = Recurrent()
    fail = layer.fail
    model = GPipe(nn.Sequential(nn.Linear(4, 4), layer), [1, 1], devices=["cpu"] * 2, chunks=2)
    model.checkpoint = "never"
    with pytest.raises(ValueError, match="x"):
        model(torch.rand(4, 4)).sum().backward()
    assert "micro-batch 0" in note_of(fail)


def test_skips_within_a_partition():
    """The layer that stashes is named, and not the one that pops."""

    @skippable(stash=["far"])
    class Stash(Square):
        def forward(self, x):
            yield stash("far", Fails.apply(x, self.fail))
            return x

    first = Stash()
    model = GPipe(nn.Sequential(nn.Linear(4, 4), first, Pop()), [3], devices=["cpu"], chunks=1)
    error = ValueError("x")
    Square.fail = error
    try:
        with pytest.raises(ValueError, match="x"):
            model(torch.rand(4, 4)).sum().backward()
    finally:
        Square.fail = None
    assert "layer 1 (" in note_of(error)


def test_parameters_of_the_caller_have_no_note():
    model = made(chunks=1)
    error = ValueError("x")
    weights = {k: Fails.apply(v, error) for k, v in model.named_parameters()}
    with pytest.raises(ValueError, match="x"):
        torch.func.functional_call(model, weights, (torch.rand(4, 4),)).sum().backward()
    assert not getattr(error, "__notes__", ())


def test_graph_that_a_layer_detaches_is_freed_at_once():
    """Looking for functions keeps nothing alive, in the first step and in later ones."""
    alive = []

    class Keep(nn.Module):
        def forward(self, x):
            output = Fails.apply(x, None)
            alive.append(weakref.ref(output.grad_fn.saved_tensors[0]))
            return output

    class Detach(nn.Module):
        def forward(self, x):
            return x.detach()

    class Ask(nn.Module):
        def forward(self, x):
            found.append(alive[-1]() is not None)
            return x

    found = []
    layers = nn.Sequential(nn.Linear(4, 4), Keep(), Detach(), nn.Identity(), Ask(), nn.Linear(4, 4))
    model = GPipe(layers, [6], devices=["cpu"], chunks=1, checkpoint="never")
    for _ in range(2):
        model(torch.rand(4, 4)).sum().backward()
    assert found == [False, False]


@pytest.mark.parametrize("first", [0, 1])
def test_function_in_some_micro_batches(first):
    """The function is found in the next step, whichever micro-batch had it."""

    class Sometimes(nn.Module):
        calls, fail = 0, None

        def forward(self, x):
            self.calls += 1
            return Fails.apply(x, self.fail) if self.calls % 2 == first else x * 1

    layers = nn.Sequential(nn.Linear(4, 4), Sometimes())
    model = GPipe(layers, [2], devices=["cpu"], chunks=2, checkpoint="never")
    model(torch.rand(4, 4)).sum().backward()
    model[1].fail = error = ValueError("x")
    with pytest.raises(ValueError, match="x"):
        model(torch.rand(4, 4)).sum().backward()
    assert note_of(error).endswith("layer 1 (Sometimes), in its backward")
