"""The parts of a graph compute what autograd does, each node of the backward once."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.graphs import Program, Stage
from tests.support.size import some


def by_autograd(layers, x, grad):
    weights = [p for p in layers.parameters() if p.requires_grad]
    wanted = [x, *weights] if x.requires_grad else weights
    output = layers(x)
    # A random program may use no weight.
    assume(output.requires_grad)
    found = torch.autograd.grad(output, wanted, grad, allow_unused=True)
    return output, found if x.requires_grad else [None, *found]


def same(found, expected):
    assert [x is None for x in found] == [x is None for x in expected]
    for a, b in zip(found, expected):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@settings(max_examples=some(300, 6), deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_random_programs(seed, needs_grad):
    torch.manual_seed(seed)
    layers = Program(seed)
    x = torch.randn(3, 4, requires_grad=needs_grad)
    grad = torch.randn(3, 4)
    expected, grads = by_autograd(layers, x, grad)
    stage = Stage(layers, x.detach().requires_grad_(needs_grad))
    (output,), saved = stage.forward()
    same([output], [expected])
    for found in (stage.backward(saved, [grad]), stage.halves(saved, [grad])):
        same([*found[0], *found[1]], grads)
    parts = stage.parts
    same(stage.checkpointed()[1], saved)
    # Each node of the backward is in one half, and none is lost.
    early, late = parts.input.slice.nodes, parts.weight.slice.nodes
    assert not set(early) & set(late)
    whole = {x.name for x in parts.backward.slice.nodes}
    more = {x.name for x in [*early, *late]} - whole
    assert whole <= {x.name for x in [*early, *late]}
    # An operator with a mask is one of B, and two of the halves.
    assert all("convolution" in x for x in more)
    # What a half does not need is not in it.
    needed = {x for node in [*early, *late] for x in node.all_input_nodes}
    results = {*parts.input.slice.outputs, *parts.weight.slice.outputs}
    assert all(node in needed or node in results or not node.users for node in [*early, *late])


def test_random_numbers_stay_in_order():
    """A part that needs no value of a layer draws its numbers all the same."""

    class Drawing(nn.Module):
        def forward(self, x):
            torch.rand_like(x)
            return x * 2

    layers = nn.Sequential(nn.Linear(3, 3), Drawing(), nn.Dropout(0.5))
    stage = Stage(layers, torch.rand(2, 3))
    parts = stage.parts
    assert parts.forward.is_random
    states = []
    for part in (parts.forward, parts.first, parts.again):
        torch.manual_seed(0)
        stage.call(part, input=[stage.x], more=[], kept=[stage.x])
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], x) for x in states)
