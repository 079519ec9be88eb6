"""The beginning of a cell's graph."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.autograd import entrance
from torchgpipe.autograd.entrance import enter


class Marked(Tensor):
    pass


@pytest.fixture(params=["node", "function", "subclass"])
def arriving(request, monkeypatch):
    """Make what arrives, where PyTorch has the node, where it has not, and of a subclass."""
    if request.param == "function":
        monkeypatch.setattr(entrance, "_has_node", lambda: False)
    kind = Marked if request.param == "subclass" else Tensor
    return lambda: [torch.rand(3).as_subclass(kind).requires_grad_() for _ in range(2)]


def test_values_and_gradients(arriving):
    given = arriving()
    found = enter(*given)
    assert [type(x) for x in found] == [type(x) for x in given]
    assert all(map(torch.equal, found, given))
    loss = (found[0] * 2 + found[1] * 3).sum()
    grads = torch.autograd.grad(loss, [get_gradient_edge(x) for x in found])
    assert [x.tolist() for x in grads] == [[2] * 3, [3] * 3]
    assert [x.grad for x in given] == [None, None]


def test_backward_ends_here(arriving):
    found, _ = enter(*arriving())
    with pytest.raises(RuntimeError, match=r"under a schedule.*add it in the loss function"):
        found.sum().backward()


@pytest.mark.parametrize("arriving", ["node", "function"], indirect=True)
def test_layers_may_change_what_enters(arriving):
    found, _ = enter(*arriving())
    edge = get_gradient_edge(found)
    changed = found.mul_(2)
    (grad,) = torch.autograd.grad(changed.sum(), [edge])
    assert grad.tolist() == [2] * 3


def test_the_graph_lets_go_of_what_arrives(arriving):
    given = arriving()
    gone = weakref.ref(given[0])
    loss = sum(x.exp().sum() for x in enter(*given))
    del given
    assert gone() is None
    assert loss.requires_grad
