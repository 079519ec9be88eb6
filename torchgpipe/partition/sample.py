"""Samples: the arguments of a call, which a plan, or ``"auto"``, measures a model with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchgpipe.values.division import has_chunks
from torchgpipe.values.structure import Arguments, arguments

__all__: list[str] = []


def input_of(sample: Any) -> Any:
    """Return a sample as the input of a first layer, as a call of the model would make it."""
    given = arguments_of(sample)
    return arguments(given.args, given.kwargs)


def arguments_of(sample: Any) -> Arguments:
    """Return the arguments of a sample.

    Args:
        sample: a mapping of keyword arguments, a tuple of positional ones, a tensor that is the
            only one, or what :func:`torchgpipe.arguments` returns.

    Raises:
        TypeError: the sample is of another kind.
        ValueError: the sample is divided already.
    """
    if has_chunks(sample):
        raise ValueError(
            "a sample has rows, which are divided in several ways and measured, so it must not be "
            f"divided already (sample: {type(sample).__name__} with Chunks); pass a mini-batch "
            "that has rows"
        )
    if isinstance(sample, Arguments):
        return sample
    if isinstance(sample, Mapping):
        return Arguments((), {**sample})
    if isinstance(sample, Tensor):
        return Arguments((sample,), {})
    if isinstance(sample, tuple):
        return Arguments(sample, {})
    raise TypeError(
        "a sample is a dict of keyword arguments, a tuple of arguments, or a tensor (sample: "
        f"{type(sample).__name__}); pass a single argument of another kind as (argument,)"
    )
