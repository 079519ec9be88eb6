"""A backward in which some outputs have no gradient is that of autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.graphs import Program, Stage
from tests.support.size import some


class Several(Program):
    """A random program that returns some of its values."""

    def forward(self, x):
        values = [x * 1]
        for step, a, b in self.steps:
            first, second = values[a % len(values)], values[b % len(values)]
            values.append(step(self, first, second, b))
        return values[0], values[len(values) // 2].sin(), values[-2], values[-1]


def compare(layers, x, given):
    """Compare both backwards with autograd's, None included."""
    outputs = layers(x)
    grads = [torch.randn_like(y) if there else None for y, there in zip(outputs, given)]
    weights = [p for p in layers.parameters() if p.requires_grad]
    ends = [(y, g) for y, g in zip(outputs, grads) if g is not None and y.requires_grad]
    roots, given = zip(*ends)
    expected = torch.autograd.grad(roots, [x, *weights], given, allow_unused=True)
    stage = Stage(layers, x)
    _, saved = stage.forward()
    grads = [grads[k] for k in stage.form.parts[None]]
    for found in (stage.backward(saved, grads), stage.halves(saved, grads)):
        for a, b in zip([*found[0], *found[1]], expected, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, atol=1e-4, rtol=1e-4)


@settings(max_examples=some(500, 8), deadline=None)
@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=4, max_size=4))
def test_random_programs(seed, there):
    torch.manual_seed(seed)
    x = torch.randn(3, 4, requires_grad=True)
    compare(Several(seed), x, there if any(there) else [True] * 4)


class Pieces(nn.Module):
    """Outputs that are pieces of one value, and one that none of the others needs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return *y.split(2, 1), self.b(x), y.relu().sqrt()


@pytest.mark.parametrize("there", [(1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 1, 0), (1, 1, 0, 0)])
def test_pieces(there):
    torch.manual_seed(0)
    compare(Pieces(), torch.randn(3, 4, requires_grad=True), there)
