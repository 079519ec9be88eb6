"""Layers that are alike take the same time, whatever the noise of a measurement says."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import median

__all__: list[str] = []

#: Half distances of quartiles that noise explains: 2.7 standard deviations, if it is normal.
NOISE = 4


def pooled(
    kinds: Sequence[Hashable], times: Sequence[float], spreads: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Give layers of one kind one time, as far as the measurement cannot tell them apart.

    Equal blocks are the rule in large models, and the middle of several measurements is surer than
    each. But a kind is only what can be seen from outside: layers of one class with parameters of
    the same size may still do other work, as the first layer does, whose input needs no gradient.
    So a layer keeps its own time if that is farther from the middle one of its kind than
    :data:`NOISE` spreads. Of few rounds a layer's own spread may be small by chance, so the
    spread that is usual for its kind counts, if that is larger.

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
