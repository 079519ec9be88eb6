"""Two parts in one function compute what each computes alone."""

import gc
import weakref
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.graphs import Exchange, Program, Stage
from tests.support.size import some
from torchgpipe.devices.streams import current_stream
from torchgpipe.graphs.overlap import (
    Interleaving,
    cut_in_two,
    interleaved,
    overlapped,
)

CPU = current_stream(torch.device("cpu"))


def stage_of(seed, exchanges):
    torch.manual_seed(seed)
    layers = [Program(seed, 4)]
    for k in range(exchanges):
        layers += [Exchange(), Program(seed + k, 3)]
    return Stage(nn.Sequential(*layers), torch.randn(3, 4, requires_grad=True))


def given_to(stage, part):
    """The arguments of a part, in a list of their own."""
    outputs, saved = stage.forward()
    torch.manual_seed(0)
    known = {"state": stage.places.read(), "input": [stage.x], "more": [], "saved": saved}
    return part.arguments(known | {"tangent": [torch.rand_like(x) for x in outputs]})


def same(found, expected):
    for x, y in zip(found, expected):
        if y is None:
            assert x is None
        else:
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@settings(max_examples=some(200, 3), deadline=None)
@given(*[st.integers(0, 10**6)] * 2, *[st.integers(0, 3)] * 2, *[st.booleans()] * 2)
def test_random_programs(seed, other, m, n, backward, again):
    one, two = stage_of(seed, m), stage_of(other, n)
    parts = one.parts.backward if backward else one.parts.forward, two.parts.backward
    if again:
        # Two micro-batches of one stage.
        two, parts = one, (parts[0], parts[0])
        two = SimpleNamespace(forward=one.forward, places=one.places, x=one.x.detach() + 1)
        two.x.requires_grad_()
    arguments = [given_to(x, part) for x, part in zip((one, two), parts)]
    if again and not backward:
        arguments[1] = [x + 1 if x is one.x else x for x in arguments[1]]
    with torch.no_grad():
        expected = [part.function([*x]) for part, x in zip(parts, arguments)]
        found = overlapped(*parts)(*arguments, Interleaving((CPU, CPU), CPU))
    for x, y in zip(found, expected):
        same(x, y)
    assert arguments == [[], []]


def test_parts_without_messages_are_left_alone():
    quiet, loud = stage_of(1, 0).parts.forward, stage_of(1, 1).parts.forward
    assert interleaved(quiet, quiet) is None
    assert interleaved(quiet, loud) is interleaved(quiet, loud) is not None


def test_functions_are_let_go_of_with_their_parts():
    one, two = stage_of(1, 1), stage_of(1, 1)
    function = weakref.ref(interleaved(one.parts.forward, two.parts.forward))
    assert function() is not None
    del two
    gc.collect()
    assert function() is None


def test_a_cut_is_even_in_arithmetic():
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], *[nn.Tanh()] * 9)
    nodes = Stage(layers, torch.rand(3, 64)).parts.forward.slice.nodes
    first, second = cut_in_two(nodes)
    assert sum("addmm" in str(x.target) for x in first) == 2
    assert [*first, *second] == nodes
