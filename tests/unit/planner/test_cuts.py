"""Cut under costs that differ from place to place, beside brute force."""

from itertools import combinations, pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.planner.cuts import cut, others

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@given(COSTS, st.data())
def test_the_largest_block_is_as_small_as_can_be(costs, data):
    blocks = data.draw(st.integers(1, len(costs)))
    slowness = data.draw(st.lists(st.integers(1, 3), min_size=blocks, max_size=blocks))

    def cost(j, start, stop):
        return slowness[j] * sum(costs[start:stop])

    def largest(sizes):
        ends = [sum(sizes[:k]) for k in range(blocks + 1)]
        return max(cost(j, ends[j], ends[j + 1]) for j in range(blocks))

    n = len(costs)
    ways = [(0, *x, n) for x in combinations(range(1, n), blocks - 1)]
    best = min(largest([b - a for a, b in pairwise(x)]) for x in ways)
    found = cut(n, blocks, cost)
    assert len(found) == blocks
    assert sum(found) == n
    assert min(found) > 0
    assert largest(found) == best


def test_blocks_that_do_not_fit_are_avoided_and_if_nothing_fits_there_is_a_cut_all_the_same():
    assert cut(4, 2, lambda j, a, b: inf if j == 0 and b - a > 1 else b - a) == [1, 3]
    assert sum(cut(4, 2, lambda j, a, b: inf)) == 4


def test_only_blocks_of_possible_cuts_are_looked_at():
    """The memory of one takes long to find."""
    asked = set()

    def cost(j, start, stop):
        asked.add((j, start, stop))
        return 1.0

    cut(9, 2, cost)
    assert asked == {(0, 0, k) for k in range(1, 9)} | {(1, k, 9) for k in range(1, 9)}


def test_equal_costs_give_even_blocks():
    assert cut(8, 4, lambda j, a, b: b - a) == [2, 2, 2, 2]


def test_others():
    assert sorted(others([2, 2])) == [[1, 3], [3, 1]]
    assert len([*others([2, 2, 2])]) == 9
    # Of many, those near by, the nearest first.
    found = [*others([20, 20, 1])]
    assert found[:2] == [[19, 21, 1], [21, 19, 1]]
    assert found[2:] == [[20, 19, 2], [19, 20, 2]]
