"""Layers cut into partitions, of which the slowest one is as fast as can be.

:func:`cut` compares all cuts, by dynamic programming. A block may cost something else at another
place, as where it is computed again, or not fit at all. :func:`evenest` and :func:`solve` cut a
sequence of costs that add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise, permutations
from math import comb, inf, lcm
from numbers import Integral

from torchgpipe.checks import finite, is_number, listed, verify

__all__ = ["cut", "evenest", "others", "solve"]

#: If there are at most so many ways to cut, :func:`others` yields all.
FEW = 100


def cut(
    n: int, blocks: int, cost: Callable[[int, int, int], float], most: float = inf
) -> list[int]:
    """Cut layers into blocks, of which the largest one costs as little as possible.

    Of such cuts it is the evenest one: the squares of its costs have the least sum.

    Args:
        n: the number of layers.
        blocks: the number of blocks, none of which is empty.
        cost: ``cost(j, start, stop)`` of layers as block ``j``; infinite for what does not fit.
        most: what no block of the best cut costs more than, nor any larger block that costs more.
    """

    def best(add: Callable[[float, float], float], bound: float) -> tuple[float, Sequence[int]]:
        # For each number of layers, counted from the first one, the least total of the blocks that
        # they are cut into, and the sizes of these blocks.
        ends: dict[int, tuple[float, Sequence[int]]] = {0: (0, ())}
        for j in range(blocks):
            before, ends, left = ends, {}, blocks - j - 1
            for start, (total, sizes) in before.items():
                for stop in range(start + 1, n - left + 1) if left else [n]:
                    if stop in ends and total >= ends[stop][0]:
                        continue
                    size = cost(j, start, stop)
                    if size > most:
                        break
                    more = add(total, size)
                    if size <= bound and (stop not in ends or more < ends[stop][0]):
                        ends[stop] = more, (*sizes, stop - start)
        return ends[n]

    largest, sizes = best(max, inf)
    # If no cut fits, any will do: the search then moves layers until one fits.
    return [*(sizes if largest == inf else best(lambda x, y: x + y * y, largest)[1])]


def others(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield other ways to cut as many layers: all if they are few, else those near by.

    Near by are those with one block a layer smaller and another one larger. Blocks in between hand
    a layer on. The nearest come first.
    """
    n, blocks = sum(sizes), len(sizes)
    if comb(n - 1, blocks - 1) <= FEW:
        for cuts in combinations(range(1, n), blocks - 1):
            other = [b - a for a, b in pairwise((0, *cuts, n))]
            if other != [*sizes]:
                yield other
        return
    pairs = permutations(range(blocks), 2)
    for give, take in sorted(pairs, key=lambda x: (abs(x[0] - x[1]), min(x))):
        if sizes[give] > 1:
            moved = [*sizes]
            moved[give] -= 1
            moved[take] += 1
            yield moved


def evenest(costs: Sequence[float], partitions: int = 1) -> list[int]:
    """The number of layers of each block of :func:`solve`.

    It takes time in proportion to the square of the layers.
    """
    costs = listed(costs, "costs must be a sequence", "costs", "pass a number for each layer")
    n = len(costs)
    valid = isinstance(partitions, Integral) and partitions is not True and partitions >= 1
    rule, remedy = "partitions must be a positive integer", "one partition takes all layers"
    verify(valid, rule, "partitions", partitions, remedy)
    if n < partitions:
        raise ValueError(
            "there must be at least one layer for each partition "
            f"(layers: {n}, partitions: {partitions}); use fewer partitions"
        )
    rule = "costs must be finite and not negative"
    for k, x in enumerate(costs):
        remedy = "measure the layer again, or estimate it"
        verify(is_number(x) and finite(x) and x >= 0, rule, f"costs[{k}]", x, remedy)
    # Costs are counted in whole units, so that sums are exact.
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*[x.denominator for x in exact])
    #: The cost of the first k layers.
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    # The largest block of the best cut is above the mean by one layer at most.
    most = sums[n] // partitions + max(b - a for a, b in pairwise(sums))
    return cut(n, partitions, lambda j, start, stop: sums[stop] - sums[start], most)


def solve(costs: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Cut a sequence into blocks, of which the largest one costs as little as possible.

    Args:
        costs: the cost of each layer, in any unit, finite and not negative.
        partitions: how many blocks to make.

    Returns:
        The blocks in order, none of them empty: of the best ones, the evenest. The squares of their
        costs have the least sum.

    Raises:
        ValueError: there are fewer costs than blocks to make, or a cost is out of range.

    Example::

        >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
        [[1, 2, 3, 4], [5, 6]]
        >>> [len(block) for block in solve([1, 2, 3, 4, 5, 6], partitions=2)]
        [4, 2]
    """
    ends = accumulate(evenest(costs, partitions), initial=0)
    return [[*costs[a:b]] for a, b in pairwise(ends)]
