"""Lanes: waits between cells that make the order of uses of each stream fixed."""

from itertools import combinations

import pytest
import torch
from torch import nn

from torchgpipe.devices.pool import StreamPool
from torchgpipe.engine.lanes import Lanes
from torchgpipe.engine.pipeline import clock_cycles
from torchgpipe.engine.stages import Stages
from torchgpipe.skip.tracker import SkipLayout
from torchgpipe.values.microbatch import VALUE


def lanes_of(places, skips, turns, monkeypatch):
    """Lanes between devices ``places``, for skips ``(from, to)``, with so many copy streams."""
    monkeypatch.setattr(StreamPool, "COPIES", turns)
    partitions = [nn.Sequential(nn.Identity()) for _ in places]
    stages = Stages(partitions, [torch.device("cpu", place) for place in places])
    stages.skip_layout = SkipLayout(len(places), dict(enumerate(skips)))
    return Lanes(stages)


def before(lanes, places, m):
    """Cells that are done when each cell begins, in the order of the clock cycles."""
    done, last = {}, {}
    for cycle in clock_cycles(m, len(places)):
        for i, j in cycle:
            needed = lanes.needs(i, j, m)
            # A device computes its own cells in that order.
            needed += [last[places[j]]] if places[j] in last else []
            done[i, j] = {*needed}.union(*[done[cell] for cell in needed])
            last[places[j]] = i, j
    return done


def users(lanes, done, turns):
    """Cells that put work on a copy stream, for each stream."""
    found = {}
    for i, j in done:
        used = {(j, part is VALUE) for part in (*lanes.sources[j], *lanes.targets[j])}
        used |= {(k, part is VALUE) for part, k in lanes.sources[j].items() if k >= 0}
        for k, is_value in used:
            found.setdefault((k, is_value, i % turns), []).append((i, j))
    return found


@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_streams_are_used_in_a_fixed_order(n, turns, monkeypatch):
    """Streams see their cells in one order, for any skips and any times of cells."""
    m = 2 * turns + 2
    ways = [*combinations(range(n), 2)]
    for places in (range(n), [0, *range(n - 1)], [k % 2 for k in range(n)]):
        for skips in [(), *combinations(ways, 1), *combinations(ways, 2)]:
            lanes = lanes_of(places, skips, turns, monkeypatch)
            done = before(lanes, places, m)
            for cells in users(lanes, done, turns).values():
                for a, b in combinations(cells, 2):
                    assert a in done[b], (places, skips, a, b)


@pytest.mark.parametrize("skips", [(), [(0, 2)], [(0, 3), (1, 2)]])
def test_nothing_is_waited_for_but_what_is_needed(skips, monkeypatch):
    """With as many copy streams as micro-batches, a cell waits only for its inputs."""
    n, m = 4, 5
    done = before(lanes_of(range(n), skips, m + 1, monkeypatch), range(n), m)
    for i, j in done:
        assert done[i, j] == {(a, b) for a in range(i + 1) for b in range(j + 1)} - {(i, j)}


def test_few_copy_streams_are_waited_for(monkeypatch):
    """No partition is ahead of the next one by as many micro-batches as there are copy streams."""
    n, m, turns = 3, 9, 4
    done = before(lanes_of(range(n), (), turns, monkeypatch), range(n), m)
    for i, j in done:
        for k in range(m):
            if j + 1 < n:
                assert ((k, j + 1) in done[i, j]) == (k <= i - turns + 1)
