"""Block partition: a sequence is cut into blocks whose largest one costs as little as possible.

The solution is exact, by bisection over the cost of the largest block. A bound is feasible if
blocks that are filled greedily up to it are few enough. Each answer moves one end of the search to
a cost that a block really has, so the search ends at the optimum itself and not near it.

Source: Pinar and Aykanat, Fast optimal load balancing algorithms for 1D partitioning (2004).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from numbers import Integral

from torchgpipe.checks import finite, is_number, listed, verify

__all__ = ["solve"]


def solve(costs: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Cut a sequence into blocks, of which the largest one costs as little as possible.

    Args:
        costs: the cost of each layer, in any unit, finite and not negative.
        partitions: how many blocks to make.

    Returns:
        The blocks in order, none of them empty. Among the optimal solutions it is one whose cuts
        are near to equal shares.

    Raises:
        ValueError: there are fewer costs than blocks to make, or a cost is out of range.

    Example::

        >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
        [[1, 2, 3, 4], [5, 6]]
        >>> [len(block) for block in solve([1, 2, 3, 4, 5, 6], partitions=2)]
        [4, 2]
    """
    costs = listed(costs, "costs must be a sequence", "costs", "pass a number for each layer")
    n = len(costs)
    verify(
        isinstance(partitions, Integral) and partitions is not True and partitions >= 1,
        "partitions must be a positive integer",
        "partitions",
        partitions,
        "one partition takes all layers",
    )
    if n < partitions:
        raise ValueError(
            "there must be at least one layer for each partition "
            f"(layers: {n}, partitions: {partitions}); use fewer partitions"
        )
    for k, cost in enumerate(costs):
        verify(
            is_number(cost) and finite(cost) and cost >= 0,
            "costs must be finite and not negative",
            f"costs[{k}]",
            cost,
            "measure the layer again, or estimate its cost",
        )

    # Costs are counted in whole units, so that sums are exact.
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*[cost.denominator for cost in exact])
    # sums[k] is the cost of the first k layers.
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    bound = _smallest_bound(sums, partitions)

    # earliest[k] is the first cut after which the blocks from k on can take the rest.
    earliest = [n]
    for _ in range(partitions):
        earliest.append(bisect_left(sums, sums[earliest[-1]] - bound))
    earliest.reverse()

    blocks = []
    start = 0
    for k in range(1, partitions + 1):
        first = max(earliest[k], start + 1)
        last = min(bisect_right(sums, sums[start] + bound) - 1, n - (partitions - k))
        # An equal share of what is left.
        share = sums[start] + (sums[n] - sums[start]) // (partitions - k + 1)
        stop = min(max(first, bisect_left(sums, share)), last)
        blocks.append(list(costs[start:stop]))
        start = stop
    return blocks


def _smallest_bound(sums: Sequence[int], partitions: int) -> int:
    """The cost of the largest block in the best solution, by bisection."""
    n = len(sums) - 1
    low = max(-(-sums[n] // partitions), max(sums[k + 1] - sums[k] for k in range(n)))
    high = sums[n]
    while low < high:
        bound = (low + high) // 2
        start, largest, next_bound = 0, 0, high
        for _ in range(partitions):
            stop = bisect_right(sums, sums[start] + bound) - 1
            largest = max(largest, sums[stop] - sums[start])
            if stop == n:
                high = largest
                break
            next_bound = min(next_bound, sums[stop + 1] - sums[start])
            start = stop
        else:
            low = next_bound
    return low
