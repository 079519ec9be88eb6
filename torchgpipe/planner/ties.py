"""Ties: layers that share a weight, which must be on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from torch import Tensor, nn

__all__: list[str] = []


def ties_of(layers: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """The pairs of layers that share a parameter or a buffer, by their numbers.

    Args:
        layers: the layers, and the loss behind them if it is a module.
    """
    first: dict[Tensor, int] = {}
    found = set()
    for k, layer in enumerate(layers):
        for x in chain(layer.parameters(), layer.buffers()):
            before = first.setdefault(x, k)
            if before != k:
                found.add((before, k))
    return sorted(found)


def are_together(
    ties: Sequence[tuple[int, int]], balance: Sequence[int], workers: Sequence[int]
) -> bool:
    """Whether each pair of layers is on one worker.

    Args:
        ties: the pairs.
        balance: the number of layers of each partition.
        workers: the worker of each partition.
    """
    own = [w for size, w in zip(balance, workers) for _ in range(size)]
    # The loss is behind the last layer, on the last worker.
    own.append(workers[-1])
    return all(own[a] == own[b] for a, b in ties)


def tied_apart(ties: Sequence[tuple[int, int]], with_loss: bool) -> ValueError:
    """The error that no plan has tied layers on one device."""
    a, b = ties[0]
    return ValueError(
        "layers that share a weight must be on one device, and no plan has them so, since each "
        f"partition has a device of its own (layers: {a} and {b}); pass a balance and devices by "
        "hand, such as devices=[0, 1, 0] with the last layers on the device of the first ones"
        f"{'' if with_loss else ', or plan with a loss, for schedules that do so'}"
    )
