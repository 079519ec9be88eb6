"""The beginning of a cell's graph."""

import weakref

import pytest
import torch
from torch import Tensor

from torchgpipe.autograd.nodes import enter


class Marked(Tensor):
    """A tensor with an attribute that a detached one has, too."""

    mark = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.detach:
            found.mark = args[0].mark
        return found


@pytest.fixture(params=[Tensor, Marked])
def arriving(request):
    """Make what arrives, of a class."""
    return lambda: [torch.rand(3).as_subclass(request.param).requires_grad_() for _ in range(2)]


def test_values_and_gradients(arriving):
    given = arriving()
    given[0].mark = 7
    found, edges = enter(*given)
    assert type(given[0]) is Tensor or found[0].mark == 7
    assert [type(x) for x in found] == [type(x) for x in given]
    assert all(map(torch.equal, found, given))
    loss = (found[0] * 2 + found[1] * 3).sum()
    grads = torch.autograd.grad(loss, edges)
    assert [x.tolist() for x in grads] == [[2] * 3, [3] * 3]
    assert [x.grad for x in given] == [None, None]


def test_backward_ends_here(arriving):
    (found, _), _ = enter(*arriving())
    with pytest.raises(RuntimeError, match=r"under a schedule.*add it in the loss function"):
        found.sum().backward()


def test_layers_may_change_what_enters():
    """A stage that has saved what arrives notices it in backward."""
    given = [torch.rand(3, requires_grad=True) for _ in range(2)]
    saved = given[0].detach()
    (found, _), (edge, _) = enter(*given)
    changed = found.mul_(2)
    (grad,) = torch.autograd.grad(changed.sum(), [edge])
    assert grad.tolist() == [2] * 3
    assert saved._version == 1


def test_the_graph_lets_go_of_what_arrives(arriving):
    given = arriving()
    gone = weakref.ref(given[0])
    loss = sum(x.exp().sum() for x in enter(*given)[0])
    del given
    assert gone() is None
    assert loss.requires_grad
