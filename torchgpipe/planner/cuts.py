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
