"""One wording for what is wrong with arguments: rule, ``(name: value)``, remedy."""

from fractions import Fraction
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import torch

from torchgpipe.checks import (
    checked_flag,
    checked_path,
    has_entries,
    listed,
    shown,
    verify,
    verify_function,
    verify_kind,
    verify_number,
)


class Unprintable(str):
    def __repr__(self):
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("x", "'x'"),
        (nan, "nan"),
        ([1, 2], "[1, 2]"),
        ([1] * 99, "list: too long"),
        ([torch.ones(2, 2)], "list: too long"),
        (torch.ones(2), "Tensor"),
        (int, "class int"),
        (Unprintable(), "Unprintable"),
    ],
)
def test_values_in_messages(value, text):
    assert shown(value) == text


def test_words():
    verify(True, "the rule", "a", 3, "the remedy")
    with pytest.raises(ValueError, match=r"^the rule \(a: 3\); the remedy$"):
        verify(False, "the rule", "a", 3, "the remedy")
    with pytest.raises(TypeError, match=r"^the rule \(a: 3\); the remedy$"):
        verify_kind(3, str, "the rule", "a", "the remedy")
    with pytest.raises(TypeError, match=r"^the rule \(a: None\); the remedy$"):
        verify_function(None, "the rule", "a", "the remedy")


@pytest.mark.parametrize("value", [0, 1.5, Fraction(1, 3), np.float32(2), np.int64(2)])
def test_numbers(value):
    verify_number(value, "the rule", "a", "the remedy")


@pytest.mark.parametrize("value", [-1, nan, inf, 10**999])
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match="the rule"):
        verify_number(value, "the rule", "a", "the remedy")


@pytest.mark.parametrize("value", [None, "1", True, 1j, [1]])
def test_other_kinds_than_numbers(value):
    with pytest.raises(TypeError, match="the rule"):
        verify_number(value, "the rule", "a", "the remedy")


def test_number_above():
    with pytest.raises(ValueError, match="the rule"):
        verify_number(0, "the rule", "a", "the remedy", above=0)


def test_flags_paths_and_lists():
    assert [checked_flag(x, "a") for x in (True, 0)] == [True, False]
    assert checked_path("a/b") == checked_path(Path("a/b")) == Path("a/b")
    for values in ([1, 2], (1, 2), iter([1, 2]), torch.tensor([1, 2]), range(1, 3)):
        assert [int(x) for x in listed(values, "the rule", "a", "the remedy")] == [1, 2]


def test_an_array_without_a_dimension_has_no_entries():
    assert all(map(has_entries, ([], "ab", iter([1]), torch.tensor([1]), np.ones(1))))
    assert not any(map(has_entries, (torch.tensor(1.0), np.array(1.0), None, 3)))
    entries = iter([1, 2])
    assert has_entries(entries)
    assert [*entries] == [1, 2]


@pytest.mark.parametrize("value", [None, 3, "ab", b"ab", {1: 2}, {1, 2}, list, torch.tensor(1)])
def test_other_kinds_than_lists(value):
    with pytest.raises(TypeError, match="the rule"):
        listed(value, "the rule", "a", "the remedy")
