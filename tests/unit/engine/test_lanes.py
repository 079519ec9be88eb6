"""Routes: which cells wait for which, so that streams are used in an order that is fixed."""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchgpipe.devices.streams import Streams
from torchgpipe.engine.lanes import Routes
from torchgpipe.engine.pipeline import clock_cycles
from torchgpipe.values.microbatch import VALUE


def routes_of(places, skips, turns, monkeypatch):
    """Routes between devices ``places``, for skips ``(from, to)``, with so many copy streams."""
    monkeypatch.setattr(Streams, "COPIES", turns)
    stashed, popped = ([{} for _ in places] for _ in range(2))
    for name, (a, b) in enumerate(skips):
        stashed[a][name], popped[b][name] = b, a
    return Routes(
        [nn.Identity() for _ in places],
        [torch.device("cpu", place) for place in places],
        [0] * len(places),
        SimpleNamespace(stashed=stashed, popped=popped),
        Streams(),
    )


def before(routes, places, m):
    """For each cell, in the order of the clock cycles, all that is done when it begins."""
    done, last = {}, {}
    for cycle in clock_cycles(m, len(places)):
        for i, j in cycle:
            needed = routes.needs(i, j, m)
            # A device computes its own cells in that order.
            needed += [last[places[j]]] if places[j] in last else []
            done[i, j] = {*needed}.union(*[done[cell] for cell in needed])
            last[places[j]] = i, j
    return done


def users(routes, done, turns):
    """The cells that put something on a copy stream, for each of them."""
    found = {}
    for i, j in done:
        lanes = {(j, part is VALUE) for part in (*routes.sources[j], *routes.targets[j])}
        lanes |= {(k, part is VALUE) for part, k in routes.sources[j].items() if k >= 0}
        for k, is_value in lanes:
            found.setdefault((k, is_value, i % turns), []).append((i, j))
    return found


@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_streams_are_used_in_a_fixed_order(n, turns, monkeypatch):
    """Whatever the skips, and however long each cell takes."""
    m = 2 * turns + 2
    ways = [*combinations(range(n), 2)]
    for places in (range(n), [0, *range(n - 1)], [k % 2 for k in range(n)]):
        for skips in [(), *combinations(ways, 1), *combinations(ways, 2)]:
            routes = routes_of(places, skips, turns, monkeypatch)
            done = before(routes, places, m)
            for cells in users(routes, done, turns).values():
                for a, b in combinations(cells, 2):
                    assert a in done[b], (places, skips, a, b)


@pytest.mark.parametrize("skips", [(), [(0, 2)], [(0, 3), (1, 2)]])
def test_nothing_is_waited_for_but_what_is_needed(skips, monkeypatch):
    """With as many copy streams as micro-batches, that is what a cell is computed from."""
    n, m = 4, 5
    done = before(routes_of(range(n), skips, m + 1, monkeypatch), range(n), m)
    for i, j in done:
        assert done[i, j] == {(a, b) for a in range(i + 1) for b in range(j + 1)} - {(i, j)}


def test_few_copy_streams_are_waited_for(monkeypatch):
    """No partition is ahead of the next one by as many micro-batches as there are of them."""
    n, m, turns = 3, 9, 4
    done = before(routes_of(range(n), (), turns, monkeypatch), range(n), m)
    for i, j in done:
        for k in range(m):
            if j + 1 < n:
                assert ((k, j + 1) in done[i, j]) == (k <= i - turns + 1)
