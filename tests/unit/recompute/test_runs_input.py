"""The input of a checkpointed cell: it is kept as it was, and let go of."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.recomputation import checkpoint, forked


def test_input_is_let_go_by_the_recomputation(device):
    gc.disable()
    try:
        leaf = torch.ones(2, device=device, requires_grad=True)
        input = leaf * 1
        kept = weakref.ref(input.untyped_storage())
        output = forked(lambda x: x + x.exp().sum(), input)
        del input
        assert kept() is not None
        loss = output.sum()
        loss.backward()
        # The graph is still there, as it is while a training loop holds its loss.
        assert kept() is None
    finally:
        gc.enable()


def test_input_changed_in_place_is_an_error(device):
    x = torch.ones(1, device=device, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="must not change its input in place.*out of place"):
        checkpoint(lambda x: x.mul_(2).sin(), x)


def test_input_changed_between_forward_and_backward_is_an_error(device):
    x = torch.ones(1, device=device)
    linear = nn.Linear(1, 1).to(device)
    output = checkpoint(lambda x: linear(x).exp(), x)
    x.zero_()
    with pytest.raises(RuntimeError, match=r"versions: \[1\], expected versions: \[0\]"):
        output.backward()
