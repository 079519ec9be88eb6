"""The evenest cut: against brute force."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.balance.test_blockpartition import exact
from torchgpipe.balance.blockpartition import solve
from torchgpipe.planner.cuts import evenest

costs = st.lists(
    st.one_of(st.integers(0, 9), st.integers(0, 10**18), st.floats(0, 1e3), st.just(0.1)),
    min_size=1,
    max_size=8,
)


def all_cuts(n, partitions):
    for cuts in combinations(range(1, n), partitions - 1):
        yield [(a, b) for a, b in pairwise((0, *cuts, n))]


def total(values, block, power=1):
    return sum(exact(x) ** power for x in values[slice(*block)])


def squares(costs, cut):
    return sum(total(costs, block) ** 2 for block in cut)


def cut_of(sizes):
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [*pairwise(ends)]


@given(costs, st.data())
def test_planted_costs(costs, data):
    """The largest block is as small as can be, and the sum of squares is least among such cuts."""
    partitions = data.draw(st.integers(1, len(costs)))
    sizes = evenest(costs, partitions)
    assert (sum(sizes), len(sizes), min(sizes) > 0) == (len(costs), partitions, True)
    cuts = [*all_cuts(len(costs), partitions)]
    largest = {id(cut): max(total(costs, block) for block in cut) for cut in cuts}
    optimum = min(largest.values())
    assert max(total(costs, block) for block in cut_of(sizes)) == optimum
    least = min(squares(costs, cut) for cut in cuts if largest[id(cut)] == optimum)
    assert squares(costs, cut_of(sizes)) == least


def test_many_layers():
    costs = [1 + (k * 7919 % 13) / 10 for k in range(400)]
    sizes = evenest(costs, 16)
    best = max(map(sum, solve(costs, 16)))
    assert max(sum(costs[a:b]) for a, b in cut_of(sizes)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("costs", "partitions", "message"),
    [
        ([1, 2], 3, r"at least one layer for each partition"),
        ([0, -1], 1, r"not negative \(costs\[1\]: -1\)"),
        ([float("inf"), 0], 1, r"finite and not negative \(costs\[0\]: inf\)"),
    ],
)
def test_errors(costs, partitions, message):
    with pytest.raises(ValueError, match=message):
        evenest(costs, partitions)
