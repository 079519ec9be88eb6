"""Stand-ins take the time of a model's partitions, and copies the time of its tensors."""

from dataclasses import asdict

import pytest

from benchmarks.rivals.library import Library
from benchmarks.simulate.costs import Costs
from benchmarks.simulate.standins import SCALE, StageCosts, Steps, cut
from tests.support.helpers import MODES
from torchgpipe import GPipe, testing

NUMBER = 4 * SCALE

STAGES = {
    "skips": StageCosts([3, 1, 2], [4, 5, 1], [2, 3], [(0, 2, 6), (1, 2, 1)], link=2.0),
    "slow links": StageCosts([1, 2, 1, 1], [2, 2, 2, 1], [9, 1, 8], [(0, 3, 12)], link=1.0),
    "one partition": StageCosts([3], [4], [], [], link=1.0),
}


def test_cut():
    costs = Costs(
        forward=[1, 2, 3, 4],
        backward=[5, 6, 7, 8],
        outputs=[NUMBER * 10, NUMBER * 20, 1, NUMBER],
        skips=[(0, 3, NUMBER * 2), (1, 3, NUMBER * 3), (0, 1, NUMBER), (1, 2, NUMBER * 4)],
    )
    assert cut(costs, [2, 1, 1], link=NUMBER * 5.0) == StageCosts(
        [3, 3, 4], [11, 7, 8], [20, 1], [(0, 1, 4), (0, 2, 5)], link=5.0
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_steps_take_as_long_as_the_limit(devices, stages, mode):
    m = 4
    steps = Steps(Library(GPipe, devices, testing), asdict(stages), m, mode)
    found = [steps.measure(seed) for seed in (None, 0, 1)]
    again = {"never": 0, "except_last": m - 1, "always": m}[mode]
    busy = [(m + again) * f + m * b for f, b in zip(stages.forward, stages.backward)]
    limit = stages.limit(mode, m)
    for step in found:
        assert step["ms"] == limit
        assert step["busy"] == pytest.approx(sum(busy) / len(busy) / limit)
    assert steps.measure(0, free=True)["ms"] == stages.limit(mode, m, free=True)


def test_limit_with_copies():
    # There and back: three cells and two copies each, and another two forwards between.
    stages = StageCosts([1, 1, 1], [2, 2, 2], [4, 4], [], link=2.0)
    assert stages.limit("never", 3) == (3 + 2 * 2 + 2) + (6 + 2 * 2 + 2 * 2)
    assert stages.limit("never", 3, free=True) == (3 + 2) * 3
