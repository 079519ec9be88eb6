"""Rounds: everything is measured once in each, so that noise falls on all alike.

A busy neighbour, or a clock that slows down when it is warm, lasts for a while. Whatever is
measured in that while, one after the other, seems slower than the rest. In rounds all are measured
at nearly the same time, again and again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import ceil
from statistics import median
from time import monotonic

__all__: list[str] = []

#: Half distances of quartiles that noise explains: 2.7 standard deviations, if it is normal.
NOISE = 4

#: As few rounds as tell how far a time varies.
LEAST = 3

#: As few rounds as have quartiles.
MANY = 8


def rounds(timeout: float | None) -> Iterator[int]:
    """Yield until a time is over, and :data:`LEAST` times at least; not at all without a time.

    Yields:
        How many rounds there will be, as far as can be seen. One that has begun is finished.
    """
    start, count, seconds = monotonic(), 0, 0.0
    while timeout is not None and (count < LEAST or seconds < timeout):
        left = max(0.0, timeout - seconds)
        yield max(LEAST, count + (ceil(left * count / seconds) if seconds > 0 else 0))
        count, seconds = count + 1, monotonic() - start


def undisturbed(times: Sequence[float]) -> float:
    """The time that something takes undisturbed: the lower quartile of its times over rounds.

    Noise only adds time, so low times are nearer to the truth than the median. The minimum would be
    nearer yet for work that is the same each time. But a layer may skip its work at random, as with
    stochastic depth or experts that get no tokens. The lower quartile stands three disturbed rounds
    of four, and one of four in which a layer does nothing. Of fewer than :data:`MANY` rounds it is
    the minimum, since of so few, noise is the greater danger.
    """
    return sorted(times)[_quarter(times)]


def spread(times: Sequence[float]) -> float:
    """Half the distance of the quartiles of a time over rounds: how far it varies between them.

    A single round that was disturbed for long does not change it, unless there are fewer than
    :data:`MANY`, of which it is half the distance of the extremes.
    """
    ordered, quarter = sorted(times), _quarter(times)
    return (ordered[-1 - quarter] - ordered[quarter]) / 2


def _quarter(times: Sequence[float]) -> int:
    return (len(times) - 1) // 4 if len(times) >= MANY else 0


def verify_timed(times: Sequence[float], device: object, what: str, elsewhere: str) -> None:
    """Check that anything takes time, before it is balanced by it.

    Raises:
        ValueError: nothing does.
    """
    if not any(times):
        raise ValueError(
            f"{what} must take time to be balanced by it, and on virtual accelerators only what "
            f"has a cost does (device: {device}, times: 0 for all {len(times)} {what}); measure "
            "within torchgpipe.testing.observe(costs='measured'), or with costs of what they call, "
            f"as in costs={{'addmm': 1.0}}, or {elsewhere}"
        )


def pooled(
    kinds: Sequence[Hashable], times: Sequence[float], spreads: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Give layers of one kind one time, as far as the measurement cannot tell them apart.

    Equal blocks are the rule in large models, and the middle of several measurements is surer than
    each. But a kind is only what can be seen from outside. So a layer keeps its own time if that
    is farther from the middle one of its kind than :data:`NOISE` spreads: its own, or the usual
    one, since of few rounds a layer's own spread may be small by chance.

    Args:
        kinds: the kind of each layer.
        times: the time of each layer, in any unit.
        spreads: how far each time varies, in the same unit.

    Returns:
        The times and the spreads, the same for layers that are pooled: the median of each.
    """
    found, noise = [*times], [*spreads]
    groups: dict[Hashable, list[int]] = {}
    for k, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(k)
    for group in groups.values():
        # A layer of them, and no mean of two, which might be like neither.
        middle = sorted(group, key=times.__getitem__)[(len(group) - 1) // 2]
        usual = median(spreads[k] for k in group)
        near = [k for k in group if abs(times[k] - times[middle]) <= NOISE * max(spreads[k], usual)]
        time, spread = median(times[k] for k in near), median(spreads[k] for k in near)
        for k in near:
            found[k], noise[k] = time, spread
    return found, noise
