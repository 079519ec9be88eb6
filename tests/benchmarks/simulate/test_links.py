"""The arithmetic of links, and schedules simulated for several costs of copies at once."""

from dataclasses import replace

import pytest

from benchmarks.simulate.links import Decoder, costs, highest, makespans, messages
from torchgpipe.schedule import named, simulate

SMALL = Decoder(width=4, layers=2, length=8, rows=3, size=2, peak=1000, used=0.5)


def test_formulae():
    assert SMALL.parameters == 12 * 2 * 16
    assert SMALL.message == 3 * 8 * 4 * 2
    assert SMALL.forward == 2 * 384 * 24 / 500
    assert SMALL.copy(SMALL.message / SMALL.forward) == pytest.approx(1)
    assert SMALL.link(SMALL.copy(7)) == pytest.approx(7)
    # The copy over F of the docstring, for any rows and length.
    other = replace(SMALL, rows=1, length=5)
    expected = pytest.approx(2 * 1000 * 0.5 / (24 * 2 * 4 * 10))
    assert SMALL.copy(10) == expected == other.copy(10)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble_v", "dualpipe_v"])
def test_one_walk_says_what_several_simulations_say(name):
    schedule = named(name, 4, 8)
    copies = [0, 0.1, 0.5, 3]
    expected = [simulate(schedule, replace(costs(schedule), copy=x)).makespan for x in copies]
    simulated, queued = makespans(schedule, copies)
    assert simulated == pytest.approx(expected)
    assert queued[0] == simulated[0]
    # A link sends its messages one after another.
    assert all(x >= max(y, messages(schedule) * c) for x, y, c in zip(queued, simulated, copies))


def test_messages_queue():
    # Worker 0 sends both micro-batches at 1 and 2, which arrive at 11 and 21 instead of 12.
    schedule = named("fill_drain", 2, 2)
    # At 24 and 26 the gradients leave worker 1, and arrive at 34 and 44 instead of 36.
    assert makespans(schedule, [10]) == ([12 + 1 + 4 + 10 + 2], [21 + 1 + 2 + 20 + 2])


@pytest.mark.parametrize(("name", "sent"), [("1f1b", 2), ("interleaved", 4), ("zero_bubble_v", 4)])
def test_messages(name, sent):
    assert messages(named(name, 4, 8)) == sent * 8


def test_highest():
    assert highest([0, 1, 2], [10, 10, 20], 15) == 1.5
    assert highest([0, 1, 2], [10, 10, 10], 15) == 2
