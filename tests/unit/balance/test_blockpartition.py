"""Block partition: against brute force."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.balance.blockpartition import solve

costs = st.lists(
    st.one_of(st.integers(0, 9), st.integers(0, 10**18), st.floats(0, 1e3), st.just(0.1)),
    min_size=1,
    max_size=9,
)


def brute_force(costs, partitions):
    n = len(costs)
    return min(
        max(sum(map(exact, costs[a:b])) for a, b in zip((0, *cuts), (*cuts, n)))
        for cuts in combinations(range(1, n), partitions - 1)
    )


def exact(cost):
    numerator, denominator = cost.as_integer_ratio()
    return numerator * (2**1100 // denominator)


@given(costs, st.data())
def test_optimal(costs, data):
    partitions = data.draw(st.integers(1, len(costs)))
    blocks = solve(costs, partitions)
    assert sum(blocks, []) == costs
    assert len(blocks) == partitions
    assert all(blocks)
    largest = max(sum(map(exact, block)) for block in blocks)
    assert largest == brute_force(costs, partitions)


def test_equal_shares_where_there_is_a_choice():
    assert [len(block) for block in solve([1] * 8, 4)] == [2, 2, 2, 2]
    # One block has to cost 9; the others need not be as uneven as they might.
    assert solve([9, 2, 2, 2, 2], 3) == [[9], [2, 2], [2, 2]]


def test_default_is_one_block():
    assert solve([1, 2, 3]) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("costs", "partitions", "message"),
    [
        ([1, 2], 0, r"partitions must be a positive integer \(partitions: 0\)"),
        ([1, 2], 3, r"at least one layer for each partition \(layers: 2, partitions: 3\)"),
        ([], 1, r"at least one layer for each partition"),
        ([1, -1], 1, r"not negative \(costs\[1\]: -1\)"),
        ([float("nan")], 1, r"finite and not negative \(costs\[0\]: nan\)"),
        ([float("inf")], 1, r"finite and not negative \(costs\[0\]: inf\)"),
    ],
)
def test_errors(costs, partitions, message):
    with pytest.raises(ValueError, match=message):
        solve(costs, partitions)


def test_large():
    """Too large for brute force: with any less for the largest block, one block more is needed."""
    random = Random(0)
    costs = [random.random() for _ in range(2000)]
    blocks = solve(costs, 64)
    assert len(blocks) == 64
    largest = max(sum(map(exact, block)) for block in blocks)
    needed, filled = 1, 0
    for cost in map(exact, costs):
        if filled + cost >= largest:
            needed, filled = needed + 1, 0
        filled += cost
    assert needed > 64
