"""How much the tests try: a part that has every value, or all with ``TORCHGPIPE_SOAK=1``."""

import os
from itertools import product

#: Whether to try all combinations, many seeds and long runs, as `make soak` does.
SOAK = os.environ.get("TORCHGPIPE_SOAK") == "1"


def matrix(*axes):
    """Combinations of values for ``parametrize``.

    A soak takes all of them. Otherwise the axes turn side by side, as often as the longest one has
    values: each value of each axis is there. Where two axes are of the same length, or one length
    divides the other, the shorter one is shifted by one after each round, so that its values do
    not always meet the same ones.
    """
    if SOAK:
        return [*product(*axes)]
    found = []
    shifts = [0] * len(axes)
    for k in range(max(map(len, axes))):
        for a, axis in enumerate(axes[1:], 1):
            shifts[a] += k > 0 and k % len(axis) == 0
        found.append(tuple(axis[(k + s) % len(axis)] for axis, s in zip(axes, shifts)))
    return found


def some(full, few):
    """A number of steps or examples, or a list of cases: all of it in a soak, few otherwise."""
    return full if SOAK else few
