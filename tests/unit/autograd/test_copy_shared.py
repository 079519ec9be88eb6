"""Users of one tensor get aliases of it, whose gradients are added once all are there."""

import torch
from torch.nn import functional as F

from torchgpipe.autograd.copy import shared


def test_gradients_are_added():
    x = torch.rand(3, requires_grad=True)
    a, b, unused = shared(x, 3)
    assert a.data_ptr() == b.data_ptr() == x.data_ptr()
    (a * 2 + b.square()).sum().backward()
    torch.testing.assert_close(x.grad, 2 + 2 * x.detach())
    assert unused.requires_grad


def test_gradients_are_added_at_once():
    """The gradient of one user does not wait for another one's."""
    x, calls = torch.rand(1, requires_grad=True), []
    a, b = shared(x, 2)
    x.register_hook(lambda grad: calls.append(("x", grad.item())))
    a.register_hook(lambda grad: calls.append(("a", grad.item())))
    b.register_hook(lambda grad: calls.append(("b", grad.item())))
    (a * 2 + b * 3 + a * 4).sum().backward()
    assert sorted(calls[:2]) == [("a", 6.0), ("b", 3.0)]
    assert calls[2:] == [("x", 9.0)]


def test_second_derivative():
    x = torch.rand(2, requires_grad=True)
    a, b = shared(x, 2)
    (grad,) = torch.autograd.grad((a * a * b).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 3 * x.detach() ** 2)
    grad.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_a_sparse_gradient_beside_a_dense_one():
    weight = torch.rand(5, 3, requires_grad=True)
    one, other = shared(weight, 2)
    (F.embedding(torch.tensor([1, 1]), one, sparse=True) @ other.t()).sum().backward()
    expected = torch.ones(5, 3) * weight.detach()[1] * 2
    expected[1] += 2 * weight.detach().sum(0)
    torch.testing.assert_close(weight.grad, expected)
