"""Layers of one kind are pooled as far as their times are near each other, beside their noise."""

import pytest

from torchgpipe.planner.sandbox import pooled


@pytest.mark.parametrize(
    ("kinds", "times", "noise", "expected"),
    [
        ("aaa", [1, 5, 9], [1, 0, 1], [5, 5, 5]),
        ("aaa", [1, 5, 10], [1, 0, 1], [3, 3, 10]),
        ("abc", [1, 2, 3], [1, 0, 1], [1, 2, 3]),
        ("aaab", [1, 2, 9, 2], [1, 1, 1, 1], [1.5, 1.5, 9, 2]),
        # Two kinds of which nothing can be seen: one of them is pooled.
        ("aaaa", [1, 9, 1, 9], [0, 0, 0, 0], [1, 9, 1, 9]),
        ("aaaa", [1, 9, 2, 9], [1, 1, 1, 1], [1.5, 9, 1.5, 9]),
        ("", [], [], []),
    ],
)
def test_pooled(kinds, times, noise, expected):
    # Of few rounds, a time is the least one.
    assert pooled(kinds, [(x, x + y, x + 2 * y) for x, y in zip(times, noise)]) == expected
