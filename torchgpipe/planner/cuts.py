"""Layers cut into partitions, of which the slowest one is as fast as can be.

:func:`solve` is exact, by bisection over the cost of the largest block. A bound is feasible if
blocks that are filled greedily up to it are few enough. Each answer moves one end of the search to
a cost that a block really has, so the search ends at the optimum itself and not near it.

Where a block may cost something else at another place, as on a slower device, or not fit there at
all, :func:`cut` compares all cuts, by dynamic programming. Times are measured, and a cut that seems
better by less than the times vary is not. So :func:`evenest` lets a block cost more than the best
cut's largest one, by what the noise of its own layers explains.

Source: Pinar and Aykanat, Fast optimal load balancing algorithms for 1D partitioning (2004).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import comb, inf, isfinite, lcm
from numbers import Integral

from torchgpipe.checks import finite, is_number, listed, verify

__all__ = ["cut", "evenest", "others", "solve"]

#: How many ways to cut are all tried.
FEW = 100


def cut(
    n: int,
    blocks: int,
    cost: Callable[[int, int, int], float],
    excuses: Callable[[float, int, int], bool] = lambda excess, start, stop: False,
    bound: float | None = None,
) -> list[int]:
    """Cut layers into blocks, of which the largest one costs as little as possible.

    Of such cuts it is the evenest one: the squares of its costs have the least sum. All cuts are
    compared, by dynamic programming.

    Args:
        n: the number of layers.
        blocks: the number of blocks, none of which is empty.
        cost: the cost of layers ``start`` to ``stop`` as block ``j``: ``cost(j, start, stop)``. It
            is infinite for what does not fit.
        excuses: whether a block may cost so much more than the largest one of the best cut, since
            nobody can tell one from the other: ``excuses(excess, start, stop)``.
        bound: the cost of that block, if it is known.

    Returns:
        The sizes of the blocks.
    """
    if bound is None:
        bound = _best(n, blocks, lambda largest, own, *_: max(largest, own), cost)[0]
    if bound == inf:
        # Nothing fits, and any cut is as good.
        return [*_best(n, blocks, lambda *_: 0.0, cost)[1]]

    def squares(before: float, own: float, start: int, stop: int) -> float | None:
        fits = own <= bound or excuses(own - bound, start, stop)
        return before + own * own if fits else None

    return [*_best(n, blocks, squares, cost)[1]]


def _best(
    n: int,
    blocks: int,
    add: Callable[[float, float, int, int], float | None],
    cost: Callable[[int, int, int], float],
) -> tuple[float, tuple[int, ...]]:
    """The least total of blocks, and their sizes; ``add`` is None for a block that may not be."""
    # best[stop] is the best way to cut the first `stop` layers.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for j in range(blocks):
        now: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, sizes) in best.items():
            for stop in range(start + 1, n - (blocks - j - 1) + 1):
                total = add(before, cost(j, start, stop), start, stop)
                if total is not None and (stop not in now or total < now[stop][0]):
                    now[stop] = total, (*sizes, stop - start)
        best = now
    return best[n]


def others(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield other ways to cut as many layers: all if they are few, else those near by.

    Near by are those with one block a layer smaller and another one larger. Blocks in between hand
    a layer on. The nearest come first.
    """
    n, blocks = sum(sizes), len(sizes)
    if comb(n - 1, blocks - 1) <= FEW:
        for cuts in combinations(range(1, n), blocks - 1):
            found = [b - a for a, b in pairwise((0, *cuts, n))]
            if found != [*sizes]:
                yield found
        return
    for distance in range(1, blocks):
        for k in range(blocks - distance):
            for give, take in ((k, k + distance), (k + distance, k)):
                if sizes[give] > 1:
                    moved = list(sizes)
                    moved[give] -= 1
                    moved[take] += 1
                    yield moved


def evenest(
    costs: Sequence[float], partitions: int = 1, spreads: Sequence[float] | None = None
) -> list[int]:
    """Cut a sequence into the evenest blocks of which none is larger than it has to be.

    The result is exact, as that of :func:`solve` is. It takes
    time in proportion to the layers, times the layers that fit into a block, times the blocks.

    Args:
        costs: the cost of each layer, in any unit, finite and not negative.
        partitions: how many blocks to make.
        spreads: how far off each cost may be, in the same unit; by default all costs are certain.
            Layers err independently, so the squares of their spreads add up to the square of the
            spread of their block. A spread above its cost counts as the cost.

    Returns:
        How many layers each block takes. Without spreads the largest block costs as little as
        possible. With them, each block costs at most its own spread more than that.

    Raises:
        ValueError: there are fewer costs than blocks to make, or a cost or a spread is out of
            range, or there are not as many spreads as costs.

    Example::

        >>> evenest([9, 2, 2, 2, 2], 3)
        [1, 2, 2]
        >>> costs = [9, 9, 9, 9, 20, 10]
        >>> evenest(costs, 3)  # Blocks of 27, 29 and 10.
        [3, 2, 1]
        >>> evenest(costs, 3, spreads=[1] * 6)  # 18, 18 and 30, which may well be 29.
        [2, 2, 2]
    """
    best = solve(costs, partitions)
    n = len(costs)
    spreads = [0.0] * n if spreads is None else spreads
    if len(spreads) != n:
        raise ValueError(
            "there must be a spread for each cost "
            f"(costs: {n}, spreads: {len(spreads)}); give 0 for a cost that is certain"
        )
    for k, spread in enumerate(spreads):
        if not (isfinite(spread) and spread >= 0):
            raise ValueError(
                f"spreads must be finite and not negative (spreads[{k}]: {spread}); "
                "give 0 for a cost that is certain"
            )

    # Costs are counted in whole units, so that sums are exact.
    exact = [Fraction(cost) for cost in costs]
    # A block of more layers must not seem smaller, as it would if noise grew faster than costs.
    noise = [min(Fraction(spread), cost) for spread, cost in zip(spreads, exact)]
    unit = lcm(*[x.denominator for x in (*exact, *noise)])
    # sums[k] is the cost of the first k layers, and squares[k] the square of their spread.
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    squares = [0, *accumulate(int(x * unit) ** 2 for x in noise)]
    cuts = [0, *accumulate(map(len, best))]
    bound = max(sums[stop] - sums[start] for start, stop in pairwise(cuts))

    return cut(
        n,
        partitions,
        lambda _, start, stop: sums[stop] - sums[start],
        lambda excess, start, stop: excess**2 <= squares[stop] - squares[start],
        bound,
    )


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
