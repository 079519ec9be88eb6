"""Tensors that exist anyway are not dropped, and a change in place of one is never overlooked."""

import pytest
import torch

from tests.support.recomputation import forked
from torchgpipe import is_recomputing
from torchgpipe.recompute.slots import modified


def twice(scale, first, second):
    """A function that saves ``scale`` twice, and changes it in between where it is told to."""

    def function(x):
        y = scale * x.exp()
        if second if is_recomputing() else first:
            with torch.no_grad():
                scale.add_(1)
        return (scale * y).exp()

    return function


@pytest.mark.parametrize(("first", "second"), [(True, True), (False, True)])
def test_change_between_two_layers_that_save_the_tensor(device, first, second):
    """The earlier one needs the value of before the change, which nobody has any more."""
    scale = torch.ones(2, device=device)
    x = torch.ones(2, device=device, requires_grad=True)
    output = forked(twice(scale, first, second), x, {id(scale): scale})
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation .*shape: \(2,\)"):
        output.sum().backward()


def test_saved_twice_and_not_changed(device):
    scale = torch.full((2,), 3.0, device=device)
    x = torch.ones(2, device=device, requires_grad=True)
    function = twice(scale, False, False)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    (found,) = torch.autograd.grad(forked(function, x, {id(scale): scale}).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("by", ["function", "somebody else"])
def test_changed_between(by, device):
    scale = torch.ones(2, device=device)

    def function(x):
        if by == "function":
            scale.mul_(1)
        return scale * x.exp()

    x = torch.ones(2, device=device, requires_grad=True)
    output = forked(function, x, {id(scale): scale})
    if by == "somebody else":
        scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_error_of_change_in_place_names_no_layer_that_is_unknown():
    assert "(shape: (2,), version: 0, expected" in str(modified(torch.ones(2), 1, None))
    assert "(saved by layer: 3, shape: (2,), version" in str(modified(torch.ones(2), 1, "3"))
