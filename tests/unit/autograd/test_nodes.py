"""Hooks of tensors are away within a block, and back after it."""

import pytest
import torch

from torchgpipe.autograd.nodes import (
    before_node,
    changes_gradients,
    count_hooks,
    note_gradients,
    without_hooks,
)


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


@pytest.mark.parametrize("way", ["fast", "has hooks", "subclass"])
def test_before_a_node(way):
    """The function is called before the node, and the tensor has no other hooks than before."""
    calls = []
    x = torch.rand(3, requires_grad=True)
    y = x * 2
    if way == "subclass":
        y = torch.rand(3).as_subclass(type("Own", (torch.Tensor,), {})) * x
    if way == "has hooks":
        y.register_hook(lambda _: calls.append("own"))
    own = getattr(y, "_backward_hooks", None)
    before_node(y, lambda *_: calls.append("before"))
    assert getattr(y, "_backward_hooks", None) is own
    x.register_hook(lambda _: calls.append("after"))
    y.sum().backward()
    assert calls == ["own"] * (way == "has hooks") + ["before", "after"]


def test_hooks_of_nodes():
    node = torch.rand(3, requires_grad=True).exp().grad_fn
    assert not changes_gradients(node)
    handle = node.register_hook(lambda *_: None)
    assert changes_gradients(node)
    handle.remove()
    assert not changes_gradients(node)


def test_counted_are_hooks_of_others():
    node = torch.rand(3, requires_grad=True).exp().grad_fn
    count = count_hooks()
    note_gradients(node, lambda _: None)
    assert count_hooks() == count
    node.register_hook(lambda *_: None)
    assert count_hooks() == count + 1
