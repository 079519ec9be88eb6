"""The lengths of the slices of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, TypeAlias

from torch import nn

from torchgpipe.values.division import divided

__all__: list[str] = []

#: The number of slices of a sequence; or their lengths in tokens; or "auto", for slices of about
#: ``TOKENS`` tokens that take equally long to compute.
Slices: TypeAlias = int | Sequence[int] | str
TOKENS = 2048


def checked_slices(slices: Any) -> Slices:
    """Check the number of slices, or their lengths.

    Raises:
        TypeError: it is neither an integer nor a list of some, nor ``"auto"``.
        ValueError: one is below 1.
    """
    if slices == "auto":
        return "auto"
    numbers = [slices] if isinstance(slices, int) else slices
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
        raise TypeError(
            "slices is the number of slices of a sequence, a list with the length of each, or "
            f"'auto' (slices: {slices!r}); pass such as slices=8"
        )
    wrong = [x for x in numbers if isinstance(x, bool) or not isinstance(x, int) or x < 1]
    if wrong:
        raise ValueError(
            f"slices of a sequence are at least one token long, and one (slices: {slices!r}); pass "
            "such as slices=8"
        )
    return slices if isinstance(slices, int) else tuple(numbers)


def count_of(slices: Slices, devices: int, length: int) -> int:
    """The number of slices of a sequence, if it has that many tokens."""
    if isinstance(slices, int):
        return slices
    if not isinstance(slices, str):
        return len(slices)
    # With fewer than two slices per device, devices idle; with more than eight, kernels are small.
    return min(8 * devices, max(2 * devices, length // TOKENS))


def lengths_of(slices: Slices, length: int, devices: int, model: nn.Module) -> list[int]:
    """The lengths of the slices of a sequence.

    Raises:
        ValueError: given lengths are not those of the sequence.
    """
    count = min(count_of(slices, devices, length), length)
    if isinstance(slices, str):
        return equal_times(count, length, model)
    if isinstance(slices, int):
        return divided(length, count)
    if sum(slices) != length:
        raise ValueError(
            "the lengths of the slices must add up to that of the sequence (slices: "
            f"{[*slices]}, sum: {sum(slices)}, sequence: {length}); pass a number of slices for "
            "sequences of several lengths"
        )
    return [*slices]


def equal_times(count: int, length: int, model: nn.Module) -> list[int]:
    """The lengths of slices that take equally long, so that later ones are shorter.

    A token takes two operations for each weight, and in each layer four for each feature of each
    token that it looks at. So the first ``p`` tokens take as long as ``w p + p² / 2``, where ``w``
    is the position at which a token spends as much on others as on weights.
    """
    config: Any = model.config
    text = config.get_text_config()
    features = text.num_hidden_layers * text.hidden_size
    w = sum(x.numel() for x in model.parameters()) / (2 * features)
    all_of_it = w * length + length**2 / 2
    ends = [round(sqrt(w**2 + 2 * all_of_it * k / count) - w) for k in range(count + 1)]
    lengths = [end - start for start, end in pairwise(ends)]
    return lengths if all(lengths) else divided(length, count)
