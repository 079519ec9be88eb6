"""Filling: when a recomputation ends."""

import pytest
import torch

from tests.support.recomputation import checkpoint


def test_ends_with_the_last_tensor_that_was_dropped(device):
    """A recomputation ends with the last dropped tensor; tensors that exist anyway do not count."""
    log = []

    def function(value):
        x, y = value
        z = x.exp()
        log.append("exp")
        z = z * 2 * y
        log.append("mul")
        try:
            return z.tanh() + x.sin()
        finally:
            log.append("tanh")

    x, y = (torch.rand(2, device=device, requires_grad=True) for _ in "xy")
    (expected,) = torch.autograd.grad(function((x, y)).sum(), x)
    log.clear()
    (grad,) = torch.autograd.grad(checkpoint(function, (x, y)).sum(), x)
    torch.testing.assert_close(grad, expected)
    assert log == ["exp", "mul", "tanh"] * 2
    log.clear()
    (grad,) = torch.autograd.grad(checkpoint(lambda v: function(v).sum(), (x, y)), x)
    torch.testing.assert_close(grad, expected)
    assert log == ["exp", "mul", "tanh"] * 2


@pytest.mark.parametrize("then", ["another", "none"])
def test_layer_that_does_not_let_the_end_pass(then, device):
    log = []

    def function(x):
        y = x
        try:
            y = x * x.exp()
        except BaseException:
            log.append("caught")
            if then == "another":
                raise KeyError from None
        return y * 1

    x = torch.ones(2, device=device, requires_grad=True)
    checkpoint(function, x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
    assert log == ["caught"]
