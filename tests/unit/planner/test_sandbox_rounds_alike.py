"""Layers of one kind are pooled as far as their times cannot be told apart."""

import pytest

from torchgpipe.planner.sandbox import pooled


@pytest.mark.parametrize(
    ("kinds", "times", "spreads", "expected"),
    [
        ("aaa", [1, 5, 9], [1, 0, 1], ([5, 5, 5], [1, 1, 1])),
        ("aaa", [1, 5, 10], [1, 0, 1], ([3, 3, 10], [0.5, 0.5, 1])),
        # The spread of a layer may be small by chance.
        ("aaa", [1, 5, 9], [0, 1, 1], ([5, 5, 5], [1, 1, 1])),
        ("abc", [1, 2, 3], [1, 0, 1], ([1, 2, 3], [1, 0, 1])),
        ("aaab", [1, 2, 9, 2], [1, 1, 1, 1], ([1.5, 1.5, 9, 2], [1, 1, 1, 1])),
        ("aaa", [1, 1, 9], [1, 1, 2], ([1, 1, 1], [1, 1, 1])),
        # Two kinds of which nothing can be seen: one of them is pooled.
        ("aaaa", [1, 9, 1, 9], [0, 0, 0, 0], ([1, 9, 1, 9], [0, 0, 0, 0])),
        ("aaaa", [1, 9, 2, 9], [1, 1, 1, 1], ([1.5, 9, 1.5, 9], [1, 1, 1, 1])),
        ("", [], [], ([], [])),
    ],
)
def test_pooled(kinds, times, spreads, expected):
    assert pooled(kinds, times, spreads) == expected
