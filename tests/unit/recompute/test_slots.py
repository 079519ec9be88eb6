"""Slots: what a second run puts into them, and where it differs from the first."""

import pytest
import torch

from tests.support.recomputation import forked
from torchgpipe import is_recomputing
from torchgpipe.recompute.checkpoint import checkpoint


def test_saved_tensor_changed_in_place_is_an_error(device):
    """The change is an error as without checkpointing, and never a wrong gradient."""

    def function(x):
        y = x.exp()
        y.add_(1)
        return y.exp()

    x = torch.ones(1, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpoint(function, x).backward()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda x: x.exp().exp(), lambda x: x.exp(), r"nothing more, forward: shape \(2,\) of"),
        (lambda x: x.exp(), lambda x: x[:1].exp(), r"shape \(1,\) of .*, forward: shape \(2,\)"),
        (lambda x: x.exp(), lambda x: x.double().exp(), ".* of torch.float64, .* of torch.float32"),
    ],
)
def test_recomputation_that_differs_is_an_error(device, first, second, message):
    x = torch.ones(2, device=device, requires_grad=True)
    output = checkpoint(lambda x: (second if is_recomputing() else first)(x), x)
    with pytest.raises(RuntimeError, match=rf"\(recomputation: {message}"):
        output.sum().backward()


def test_ends_with_the_last_tensor_that_was_dropped(device):
    """A second run ends with the last dropped tensor; tensors that exist anyway do not count."""
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


def test_function_may_change_what_is_its_own_in_both_runs(device):
    """The layer's own tensor may be saved behind the last tensor that was dropped."""
    scale = torch.ones(2, device=device)

    def function(x):
        scale.mul_(1)
        return scale * x.exp()

    x = torch.ones(2, device=device, requires_grad=True)
    forked(function, x, {id(scale)}).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
