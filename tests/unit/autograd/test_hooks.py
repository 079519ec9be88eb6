"""Hooks of tensors are away within a block, and back after it."""

import pytest
import torch

from torchgpipe.autograd.hooks import without_hooks


def test_hooks_are_away_and_back():
    calls = []
    x = torch.rand(3, requires_grad=True)
    y = torch.rand(3, requires_grad=True)
    x.register_hook(calls.append)
    with without_hooks([x, x, y]):
        torch.autograd.grad((x * 2).sum(), x)
    assert not calls
    torch.autograd.grad((x * 2).sum(), x)
    assert len(calls) == 1


def test_hooks_are_back_after_a_failure():
    calls = []
    x = torch.rand(3, requires_grad=True)
    x.register_hook(calls.append)
    with pytest.raises(KeyError), without_hooks([x]):
        raise KeyError
    x.sum().backward()
    assert len(calls) == 1


def test_hook_that_is_added_within():
    calls = []
    x = torch.rand(3, requires_grad=True)
    x.register_hook(lambda _: calls.append("before"))
    with without_hooks([x]):
        x.register_hook(lambda _: calls.append("within"))
    x.sum().backward()
    assert calls == ["before", "within"]


def test_removed_handle():
    calls = []
    x = torch.rand(3, requires_grad=True)
    handle = x.register_hook(calls.append)
    with without_hooks([x]):
        pass
    handle.remove()
    x.sum().backward()
    assert not calls
