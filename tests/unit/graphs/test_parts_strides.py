"""Graphs compute the same, whatever strides kernels return."""

import pytest
import torch
from torch import nn

from tests.support.graphs import Stage
from torchgpipe.graphs.parts import copy_with_strides, laid_out


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        # The kernel keeps the strides of channels-last, and the fake one does not.
        return self.function(x.roll(1, 2).contiguous())


def changed(x):
    x.view(-1)[3::7].mul_(2)
    return x * 1


CASES = {
    "view": lambda x: x.view(2, -1).sin(),
    "another view": lambda x: x.view(2, 2, -1).sin().view(x.shape),
    "strides": lambda x: x.as_strided((2, 4), (96, 1)).exp(),
    "bytes": lambda x: x.detach().view(torch.int32).float() + x,
    "complex": lambda x: torch.view_as_complex(x.view(2, -1, 2)).abs(),
    "changed": changed,
    "changed strides": lambda x: changed(x.as_strided((2, 48), (96, 2))),
}


def channels_last():
    return torch.rand(2, 4, 4, 6).contiguous(memory_format=torch.channels_last).requires_grad_()


def check(case, recompute):
    layers, x = Layer(CASES[case]), channels_last()
    output = layers(x)
    (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
    stage = Stage(layers, x, recompute=recompute)
    found, saved = stage.forward()
    assert torch.equal(found[0], output)
    tangents = [torch.ones_like(output)]
    for some in (saved, stage.checkpointed()[1]):
        assert torch.equal(stage.backward(some, tangents)[0][0], grad)
        assert torch.equal(stage.halves(some, tangents)[0][0], grad)


def test_strides_that_no_kernel_returns():
    for case in CASES:
        for recompute in ("everything", "min-cut"):
            try:
                check(case, recompute)
            except RuntimeError as error:
                pytest.fail(f"{case}: {error}")


def test_outputs():
    """The layers behind may take views that need no copy of what these have made contiguous."""
    layers, x = Layer(lambda x: x), channels_last()
    assert layers(x).is_contiguous()
    (found,), _ = Stage(layers, x).forward()
    assert found.is_contiguous()


def test_laid_out():
    x = torch.rand(2, 3)
    assert laid_out(x, (3, 1)) is x
    assert copy_with_strides(x, (3, 1)) is not x
    found = laid_out(x, (1, 2))
    assert torch.equal(found, x)
    assert found.stride() == (1, 2)
    z = torch.rand(2, 3, dtype=torch.complex64).conj()
    for x in (z, z.imag, z._neg_view()):
        found = copy_with_strides(x, (1, 2))
        assert torch.equal(found, x)
        assert (found.is_conj(), found.is_neg()) == (x.is_conj(), x.is_neg())
