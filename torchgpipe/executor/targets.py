"""The further arguments of the loss: targets, split as the input is, on the last device."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import add_note
from torchgpipe.devices.pool import StreamPool
from torchgpipe.executor.links import fetched
from torchgpipe.partition.traps import lists
from torchgpipe.values import trees
from torchgpipe.values.structure import NoChunk, is_split, names, split

__all__: list[str] = []


class explaining:
    """Note on an error within a ``with`` block that all but the first argument go to the loss.

    Args:
        targets: the arguments of the step behind the first one.
        layer: the first layer.
    """

    def __init__(self, targets: Sequence[Any], layer: nn.Module | None) -> None:
        self._targets, self._layer = targets, layer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._targets or self._layer is None or not isinstance(error, TypeError):
            return
        # Python itself says so of a layer that is called with one argument, and takes several.
        name = getattr(type(self._layer).forward, "__qualname__", "")
        if str(error).startswith(f"{name}() missing"):
            add_note(
                error,
                "the model gets the first argument of a step, and the loss gets all others "
                f"(for the loss: {len(self._targets)}); pass several arguments of the first layer "
                "as one, torchgpipe.arguments(...)",
            )


def arguments_of(
    value: Any, rows: Sequence[int], m: int, pool: StreamPool, device: torch.device
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[Any]]:
    """The arguments of the loss for each micro-batch, and the events of their copies.

    Args:
        value: the arguments that the caller gave, positional ones and those by name.
        rows: the number of rows of each micro-batch; none if there is one micro-batch.
        m: the number of micro-batches.
        pool: the streams on which tensors are copied.
        device: the device of the last stage.

    Raises:
        ValueError: the arguments have other rows than the input, or require a gradient.
    """
    targets, more = value
    each = [(f"targets[{k}]", x) for k, x in enumerate(targets)] + [*more.items()]
    leaves = [(_path(name, path), leaf) for name, x in each for path, leaf in names(x)]
    for name, leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "targets must not require a gradient, since the loss hands over those of its "
                f"input and weights (argument: {name}, shape: {tuple(leaf.shape)}); pass "
                "target.detach(), or make it an input that the layers pass on"
            )
        if is_split(leaf) and rows and len(leaf) != sum(rows):
            raise ValueError(
                "targets must have as many rows as the input, since each micro-batch takes "
                f"the same rows of all (argument: {name}, shape: {tuple(leaf.shape)}, rows: "
                f"{sum(rows)}); pass what every micro-batch shall get whole as "
                "torchgpipe.NoChunk(value)"
            )
    found = [x for name, one in each for x in lists(one, name)] if rows else []
    wrong = [path for path, length in found if length == sum(rows)]
    if wrong:
        raise ValueError(
            "targets must be tensors to be split into micro-batches "
            f"(lists or arrays with an entry for each row: {', '.join(wrong)}, rows: "
            f"{sum(rows)}); pass a tensor, or what every micro-batch shall get whole as "
            "torchgpipe.NoChunk(value)"
        )
    value, events = fetched(pool, value, device)
    if not rows:
        # One micro-batch gets all as it is.
        return [trees.map_leaves(_whole, value)], events
    return [*split(value, rows)], events


def _path(name: str, path: str) -> str:
    """The path to a leaf of an argument: its name alone, if it is the leaf."""
    if path == "the value":
        return name
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


def _whole(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, NoChunk) else leaf
