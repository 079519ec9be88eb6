"""Lengths of slices add up to the sequence, whatever it is."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchgpipe.mapped.slice_lengths import count_of, equal_times, lengths_of


class Config:
    """The sizes of a model, as one of Transformers has them."""

    num_hidden_layers = 2
    hidden_size = 8

    def get_text_config(self):
        return self


def model():
    found = nn.Linear(64, 32)
    found.config = Config()
    return found


@given(st.one_of(st.integers(1, 9), st.just("auto")), st.integers(1, 50), st.integers(1, 4))
def test_they_add_up(slices, length, devices):
    found = lengths_of(slices, length, devices, model())
    assert sum(found) == length
    assert len(found) == min(count_of(slices, devices, length), length)
    assert min(found) >= 1


def test_longer_sequences_have_more_slices():
    assert [count_of("auto", 4, x) for x in (64, 16384, 32768, 131072)] == [8, 8, 16, 32]


def test_even_ones():
    assert lengths_of(4, 10, 2, model()) == [3, 3, 2, 2]


def test_slices_of_equal_time():
    """The last ones are shorter, the more so the less a token costs without others."""
    found = equal_times(4, 4096, model())
    assert found == sorted(found, reverse=True)
    w = sum(x.numel() for x in model().parameters()) / (2 * 2 * 8)
    ends = [sum(found[:k]) for k in range(5)]
    times = [w * (b - a) + (b**2 - a**2) / 2 for a, b in pairwise(ends)]
    assert max(times) / min(times) == pytest.approx(1, abs=0.01)
