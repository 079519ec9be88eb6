"""Generators of others are put back, and it is an error to use them."""

import random

import numpy
import pytest
import torch

from torchgpipe.graphs.generators import drawing_nothing
from torchgpipe.graphs.places import UntraceableError

DRAWS = (random.random, numpy.random.rand, lambda: torch.manual_seed(7), lambda: torch.rand(1))


@pytest.mark.parametrize("draw", DRAWS)
def test_draws(draw):
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(UntraceableError, match="random numbers"), drawing_nothing():
        draw()
    assert states == (
        *(random.getstate(), numpy.random.get_state()[1].tolist()),
        torch.get_rng_state().tolist(),
    )


def test_nothing():
    with drawing_nothing():
        torch.empty(2)
