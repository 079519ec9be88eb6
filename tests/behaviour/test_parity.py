"""A wrapped model computes what the model computes: outputs, gradients and buffers.

The reference is the plain module, run on the micro-batches one after another.
"""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.conftest import DEVICES
from tests.support.helpers import MODES, plain
from torchgpipe import GPipe

CHUNKS = [1, 2, 3, 8]
WIDTH = 4


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
        )

    def forward(self, x):
        return x + self.block(x)


class Shift(nn.Module):
    """A layer with views and a change in place, as layers of attention have them."""

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        y = torch.cat([b, a], dim=-1)
        y.mul_(2)
        return y.view(-1, WIDTH)


class Split(nn.Module):
    """A layer from a tensor to a tuple, one item of which needs no gradient."""

    def forward(self, x):
        return x.tanh(), x.detach().abs(), x.argmax(dim=-1)


class Merge(nn.Module):
    def forward(self, value):
        x, scale, index = value
        return x * scale + index[:, None]


#: Layers of one width, in groups that stay in order but may be cut anywhere.
GROUPS = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "batch norm": lambda: [nn.BatchNorm1d(WIDTH)],
    "layer norm": lambda: [nn.LayerNorm(WIDTH), nn.GELU()],
    "residual": lambda: [Residual()],
    "in place": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "in place within": lambda: [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ELU(inplace=True))],
    "shift": lambda: [Shift()],
    "tuple": lambda: [Split(), Merge()],
    "tuples": lambda: [Split(), nn.Identity(), Merge()],
    "frozen": lambda: [nn.Linear(WIDTH, WIDTH).requires_grad_(False)],
    "nothing": lambda: [nn.Identity()],
}


@st.composite
def models(draw):
    """A random module, and a random balance for it."""
    names = draw(st.lists(st.sampled_from(sorted(GROUPS)), min_size=1, max_size=6))
    torch.manual_seed(draw(st.integers(0, 99)))
    layers = [layer for name in names for layer in GROUPS[name]()]
    cuts = draw(st.sets(st.integers(1, len(layers) - 1), max_size=4)) if len(layers) > 1 else ()
    ends = [0, *sorted(cuts), len(layers)]
    return nn.Sequential(*layers), [b - a for a, b in pairwise(ends)]


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def close(a, b):
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def batch(rows, device):
    """A batch far enough from kinks and ties for rounding not to matter."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=100)
@given(
    models(),
    st.sampled_from(CHUNKS),
    st.sampled_from(MODES),
    st.sampled_from([2, 5, 8, 11, 16]),
    st.booleans(),
)
def test_training(device, model, chunks, mode, rows, input_requires_grad):
    module, balance = model
    module = module.to(device)
    # Batch norm takes no micro-batch of a single row.
    rows = max(rows, 2 * chunks)
    reference = copy.deepcopy(module)
    wrapped = GPipe(
        module, balance, devices=[device] * len(balance), chunks=chunks, checkpoint=mode
    )
    x = batch(rows, device).requires_grad_(input_requires_grad)
    y = batch(rows, device).requires_grad_(input_requires_grad)

    for _ in range(2):
        expected = plain(reference, x, chunks)
        output = wrapped(y)
        assert torch.equal(expected, output)
        assert expected.requires_grad == output.requires_grad
        if output.requires_grad:
            expected.square().mean().backward()
            output.square().mean().backward()
        assert close(x.grad, y.grad)
        for (name, p), q in zip(reference.named_parameters(), wrapped.module.parameters()):
            assert close(p.grad, q.grad), name
        # As found by the forward, and left alone by the recomputation.
        for name, buffer in buffers(reference).items():
            assert torch.equal(buffer, buffers(wrapped.module)[name]), name


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=50)
@given(models(), st.sampled_from(CHUNKS), st.sampled_from(MODES), st.booleans())
def test_evaluation(device, model, chunks, mode, with_grad):
    module, balance = model
    module = module.to(device).eval()
    before = buffers(module)
    x = batch(9, device)
    expected = plain(module, x, chunks)
    gradients = []
    if with_grad and expected.requires_grad:
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(expected.sum(), parameters, allow_unused=True)
    wrapped = GPipe(
        module, balance, devices=[device] * len(balance), chunks=chunks, checkpoint=mode
    )
    with torch.set_grad_enabled(with_grad):
        output = wrapped(x)
    assert torch.equal(expected, output)
    assert output.requires_grad == (with_grad and expected.requires_grad)
    if gradients:
        for a, b in zip(
            gradients, torch.autograd.grad(output.sum(), parameters, allow_unused=True)
        ):
            assert close(a, b)
    for name, buffer in buffers(wrapped.module).items():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=50)
@given(models(), st.sampled_from(CHUNKS), st.sampled_from(MODES))
def test_autograd_grad(device, model, chunks, mode):
    """torch.autograd.grad returns single gradients, and accumulates none."""
    module, balance = model
    module = module.to(device).eval()
    leaves = [x := batch(8, device).requires_grad_()]
    leaves += [p for p in module.parameters() if p.requires_grad]
    wrapped = GPipe(
        module, balance, devices=[device] * len(balance), chunks=chunks, checkpoint=mode
    )
    wrapped.train()
    for layer in wrapped.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval()
    for some in (leaves, leaves[:1], leaves[-1:]):
        expected = torch.autograd.grad(
            plain(wrapped.module, x, chunks).sum(), some, allow_unused=True
        )
        actual = torch.autograd.grad(wrapped(x).sum(), some, allow_unused=True)
        for a, b in zip(expected, actual):
            assert close(a, b)
    assert all(leaf.grad is None for leaf in leaves)
