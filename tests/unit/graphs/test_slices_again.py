"""Choices of what is computed again, and what is kept for that."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.graphs import Program, Stage, kept
from tests.support.size import some
from torchgpipe.graphs.slices import CHOICES


@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=some(200, 4), deadline=None)
@given(st.integers(0, 10**6))
def test_random_programs(choice, seed):
    """A recomputation gives all that is saved, from what was kept."""
    torch.manual_seed(seed)
    layers, x = Program(seed), torch.randn(3, 4, requires_grad=True)
    stage = Stage(layers, x, recompute=choice)
    outputs, saved = stage.forward()
    found, again = stage.checkpointed()
    for a, b in zip([*found, *again], [*outputs, *saved]):
        assert torch.equal(a, b)
    # Never more than without a recomputation.
    if choice == "min-cut":
        assert kept(stage.parts).checkpoint <= kept(stage.parts).activation


def names(nodes):
    return [str(x.target).split(".")[1] for x in nodes]


def test_cheap_operators_are_computed_again():
    layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.Tanh())
    x = torch.rand(3, 4, requires_grad=True)
    stage = Stage(layers, x, recompute="min-cut")
    parts = stage.parts
    assert "gelu" in names(parts.again.slice.nodes)
    assert not {"addmm", "mm"} & {*names(parts.again.slice.nodes)}
    bytes_of = kept(parts)
    # Of gelu, whose input and output are both saved, the input alone.
    assert bytes_of.activation - bytes_of.checkpoint == 3 * 16 * 4
    everything = kept(Stage(layers, x).parts)
    assert everything.checkpoint < bytes_of.checkpoint


def test_the_smaller_end_is_kept():
    """A norm of a short vector, repeated: the vector is kept, and not what is made of it."""

    class Repeat(nn.Module):
        def forward(self, x):
            return x.sin().repeat(8, 1).cos().exp()

    layers = nn.Sequential(nn.Linear(4, 4), Repeat())
    parts = Stage(layers, torch.rand(3, 4, requires_grad=True), recompute="min-cut").parts
    assert kept(parts).checkpoint == 2 * 3 * 4 * 4 < kept(parts).activation


def test_what_draws_numbers_or_changes_memory_is_kept():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Tanh())
    parts = Stage(layers, torch.rand(3, 4, requires_grad=True), recompute="min-cut").parts
    assert not parts.again.is_random
    assert parts.changed_again == []
    assert {"native_batch_norm", "bernoulli_"}.isdisjoint(names(parts.again.slice.nodes))
