"""Layers cut into partitions, of which the slowest one is as fast as can be.

Unlike :mod:`torchgpipe.balance.blockpartition`, each block may cost something else at another
place, as on a slower device, and may not fit there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from math import comb, inf

__all__ = ["cut", "others"]

#: How many ways to cut are all tried.
FEW = 100


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
