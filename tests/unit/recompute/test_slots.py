"""Slots: what a recomputation puts into them, and where it differs from the first."""

import pytest
import torch

from tests.support.recomputation import checkpoint
from torchgpipe import is_recomputing
from torchgpipe.ambient.notes import layer
from torchgpipe.recompute import slots


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
def test_recomputation_that_differs_is_an_error(device, first, second, message, monkeypatch):
    # A test before may have left the name of a layer that has failed.
    monkeypatch.setattr(layer, "name", None)
    x = torch.ones(2, device=device, requires_grad=True)
    output = checkpoint(lambda x: (second if is_recomputing() else first)(x), x)
    with pytest.raises(RuntimeError, match=rf"\(recomputation: {message}"):
        output.sum().backward()


def test_compiled_layers_that_save_other_tensors(monkeypatch):
    """PyTorch may have left one of the two runs to Python."""
    monkeypatch.setattr(slots, "has_compiled", lambda: True)
    assert "torch._dynamo.config.recompile_limit" in str(slots.mismatch("one", "another"))
