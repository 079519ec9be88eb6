"""Memory of a checkpoint: what it keeps until backward, and lets go of."""

import gc
import weakref

import pytest
import torch

from tests.support.recomputation import checkpoint, forked


def test_what_is_saved_lives_from_recomputation_to_use(device):
    """Nothing lives between forward and backward; then each tensor until its node is done."""
    alive = {"forward": [], "backward": []}
    refs = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.clone()
            refs.append(weakref.ref(y.untyped_storage()))
            ctx.save_for_backward(y)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            alive["backward"].append(sum(ref() is not None for ref in refs))
            (y,) = ctx.saved_tensors
            return 2 * y * grad

    def function(x):
        for _ in range(3):
            x = Square.apply(x)
            alive["forward"].append(sum(ref() is not None for ref in refs))
        return x

    gc.disable()
    try:
        x = torch.tensor([1.1], device=device, requires_grad=True)
        output = checkpoint(function, x)
        assert alive["forward"] == [0, 0, 0]
        output.backward()
    finally:
        gc.enable()
    # The first one asks for it.
    assert alive["backward"] == [0, 2, 1]
    assert sum(ref() is not None for ref in refs) == 0
    assert x.grad.item() == pytest.approx(8 * 1.1**7)


def test_what_lasts_is_not_kept_by_a_graph_that_it_gets(device):
    """Empty tensors stay, and this one becomes the output of the operator that saved it."""

    def function(x):
        empty = torch.empty(0, device=device)
        empty.add_(x[:0] * empty)
        return x.exp() + empty.sum()

    gc.disable()
    try:
        input = torch.ones(2, device=device, requires_grad=True) * 1
        kept = weakref.ref(input.untyped_storage())
        output = forked(function, input)
        del input, output
        assert kept() is None
    finally:
        gc.enable()


def test_second_graph_is_thrown_away(device):
    """No tensor of the second graph is alive when backward reaches the layers."""
    alive = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive.append(input() is not None)
            return grad

    gc.disable()
    try:
        x = torch.ones(2, device=device, requires_grad=True) * 1
        input = weakref.ref(x.untyped_storage())
        output = checkpoint(lambda x: Look.apply(x * 2).exp(), x)
        del x
        output.sum().backward()
    finally:
        gc.enable()
    assert alive == [False]


def test_graph_that_is_dropped_leaves_nothing(device):
    gc.disable()
    try:
        input = torch.ones(2, device=device, requires_grad=True) * 1
        kept = weakref.ref(input.untyped_storage())
        output = checkpoint(lambda x: x.sin(), input)
        del input, output
        assert kept() is None
    finally:
        gc.enable()
