"""Layers cut into partitions, of which the slowest one is as fast as can be.

Unlike :mod:`torchgpipe.balance.blockpartition`, each block may cost something else at another
place, as on a slower device, and may not fit there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

__all__ = ["cut", "neighbours"]


def cut(n: int, blocks: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Cut layers into blocks, of which the largest one costs as little as possible.

    Of equal solutions it is an even one: the squares of its costs have a small sum.

    Args:
        n: the number of layers.
        blocks: the number of blocks, none of which is empty.
        cost: the cost of layers ``start`` to ``stop`` as block ``j``: ``cost(j, start, stop)``. It
            is infinite for what does not fit.

    Returns:
        The sizes of the blocks.
    """
    # best[stop] is the best way to cut the first `stop` layers: the largest cost, the sum of the
    # squares, and the sizes.
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    best += [(inf, inf, ())] * n
    for j in range(blocks):
        now: list[tuple[float, float, tuple[int, ...]]] = [(inf, inf, ())] * (n + 1)
        for stop in range(j + 1, n - (blocks - j - 1) + 1):
            for start in range(j, stop):
                largest, squares, sizes = best[start]
                if len(sizes) != j:
                    continue
                own = cost(j, start, stop)
                found = max(largest, own), squares + own * own, (*sizes, stop - start)
                if found[:2] < now[stop][:2] or not now[stop][2]:
                    now[stop] = found
        best = now
    return list(best[n][2])


def neighbours(sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the sizes with one layer moved from a block to the one beside it.

    Yields:
        The block that has one layer less, and the sizes.
    """
    for k in range(len(sizes) - 1):
        for give, take in ((k, k + 1), (k + 1, k)):
            if sizes[give] > 1:
                moved = list(sizes)
                moved[give] -= 1
                moved[take] += 1
                yield give, moved
