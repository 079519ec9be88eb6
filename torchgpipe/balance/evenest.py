"""The evenest cut: of all cuts that are as good as the best one, that of the most even blocks.

The largest block decides how fast a pipeline is, and :func:`blockpartition.solve` makes it as small
as can be. But times are measured, and a cut that seems better by less than the times vary is not.
So a block may also cost more than the best cut's largest one, by what the noise of its own layers
explains. Among the cuts of such blocks the sum of squares is least for the evenest one, which
dynamic programming finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

from torchgpipe.balance.blockpartition import solve
from torchgpipe.planner.cuts import cut

__all__ = ["evenest"]


def evenest(
    costs: Sequence[float], partitions: int = 1, spreads: Sequence[float] | None = None
) -> list[int]:
    """Cut a sequence into the evenest blocks of which none is larger than it has to be.

    The result is exact, as that of :func:`~torchgpipe.balance.blockpartition.solve` is. It takes
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
