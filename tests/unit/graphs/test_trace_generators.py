"""A layer that draws numbers which a graph cannot draw is no graph."""

import random

import numpy
import pytest
import torch

from torchgpipe.graphs.places import UntraceableError
from torchgpipe.graphs.trace import drawing_nothing

DRAWS = {
    "Python": random.random,
    "NumPy": numpy.random.rand,
    "another seed": lambda: torch.manual_seed(7),
    "the same seed": lambda: torch.manual_seed(torch.initial_seed()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name):
    torch.rand(1)
    with pytest.raises(UntraceableError, match="random numbers"), drawing_nothing():
        DRAWS[name]()


def test_nothing():
    with drawing_nothing():
        torch.empty(2)


def test_numbers_that_another_thread_draws():
    with drawing_nothing():
        torch.rand(2)
