"""Rounds: how many there are, and what is made of their times."""

from itertools import chain, repeat

import pytest

from torchgpipe.planner import sandbox as rounds
from torchgpipe.planner.sandbox import undisturbed, verify_timed


@pytest.mark.parametrize(
    ("seconds", "timeout", "expected"),
    [([1.0] * 9, 0, 3), ([1.0] * 9, 4.5, 5), ([4.0, *[1.0] * 9], 6.5, 4), ([1.0], None, 0)],
)
def test_rounds(seconds, timeout, expected, monkeypatch):
    """Three rounds come at least, and one that has begun is finished."""
    now = [10.0]
    monkeypatch.setattr(rounds, "monotonic", lambda: sum(now))

    def take():
        now.append(seconds[len(now) - 1])
        return [float(len(now))]

    assert len(rounds.rounds(timeout, take, iter)) == len(now) - 1 == expected


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 3), (1e-13, 3), (1e-6, 7)])
def test_equal_times_end_early(noise, expected, monkeypatch):
    """On a simulated clock all rounds take the same, and more of them would tell nothing."""
    now = iter(range(99))
    monkeypatch.setattr(rounds, "monotonic", lambda: next(now))
    drawn = chain([1.0, 1.0 + noise], repeat(1.0))
    assert len(rounds.rounds(4.5, lambda: {"a": 0.0, "b": next(drawn)}, dict.values)) == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([3.0], 3),
        ([9.0, 2.0, 5.0], 2),
        # Of four rounds three are disturbed, or one does nothing.
        ([7.0, 9.0, 1.0, 8.0], 1),
        ([0.0, *[3.0] * 7], 3),
        ([0.0, *[3.0] * 6], 3),
        ([0.0, 3.0, 3.0, 3.0], 0),
        ([*[1.0] * 7, 99.0], 1),
        ([*range(101)], 25),
    ],
)
def test_estimates(times, expected):
    assert undisturbed(times) == expected


def test_nothing_takes_time():
    verify_timed([0.0, 1.0], "cpu", "layers", "elsewhere")
    text = r"blocks must .*device: x:0, times: 0 for all 2 blocks.*, or elsewhere$"
    with pytest.raises(ValueError, match=text):
        verify_timed([0.0, 0.0], "x:0", "blocks", "elsewhere")
