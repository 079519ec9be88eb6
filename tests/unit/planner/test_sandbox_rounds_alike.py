"""Layers of one kind are pooled as far as their times cannot be told apart."""

import pytest

from torchgpipe.planner.sandbox import pooled


@pytest.mark.parametrize(
    ("kinds", "times", "spreads", "expected"),
    [
        ("aaa", [1, 5, 9], [1, 0, 1], [5, 5, 5]),
        ("aaa", [1, 5, 10], [1, 0, 1], [3, 3, 10]),
        # The spread of a layer may be small by chance.
        ("aaa", [1, 5, 9], [0, 1, 1], [5, 5, 5]),
        ("abc", [1, 2, 3], [1, 0, 1], [1, 2, 3]),
        ("aaab", [1, 2, 9, 2], [1, 1, 1, 1], [1.5, 1.5, 9, 2]),
        ("aaa", [1, 1, 9], [1, 1, 2], [1, 1, 1]),
        # Two kinds of which nothing can be seen: one of them is pooled.
        ("aaaa", [1, 9, 1, 9], [0, 0, 0, 0], [1, 9, 1, 9]),
        ("aaaa", [1, 9, 2, 9], [1, 1, 1, 1], [1.5, 9, 1.5, 9]),
        ("", [], [], []),
    ],
)
def test_pooled(kinds, times, spreads, expected):
    # Of few rounds, a time is the least one, and the spread half of the way to the largest one.
    assert pooled(kinds, [(x, x + 2 * y) for x, y in zip(times, spreads)]) == expected
