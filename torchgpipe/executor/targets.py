"""The further arguments of the loss: targets, split as the input is, on the last device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import add_note
from torchgpipe.devices.pool import StreamPool
from torchgpipe.executor.links import fetched
from torchgpipe.partition.traps import lists
from torchgpipe.values import trees
from torchgpipe.values.division import Division, divided, leaves_in, rows_in, split
from torchgpipe.values.marks import Chunks, is_of_input
from torchgpipe.values.structure import names

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
    value: Any, division: Division, pool: StreamPool, device: torch.device
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[Any]]:
    """The arguments of the loss for each micro-batch, and the events of their copies.

    Args:
        value: the arguments that the caller gave, positional ones and those by name.
        division: the division of the input.
        pool: the streams on which tensors are copied.
        device: the device of the last stage.

    Raises:
        ValueError: the arguments have other rows than the input, or require a gradient.
    """
    targets, more = value
    each = [(f"targets[{k}]", x) for k, x in enumerate(targets)] + [*more.items()]
    m, rows = division.m, sum(division.sizes)
    found: dict[str, tuple[int, Any]] = {}
    for name, x in each:
        for path, leaf in names(x, leaves_in(x, rows)):
            path = _path(name, path)
            for tensor in _tensors(leaf) if torch.is_grad_enabled() else ():
                if tensor.requires_grad:
                    raise ValueError(
                        "targets must not require a gradient, since the loss hands over those of "
                        f"its input and weights (argument: {path}, shape: {tuple(tensor.shape)}); "
                        "pass target.detach(), or make it an input that the layers pass on"
                    )
            if isinstance(leaf, Chunks) and len(leaf) != m:
                raise ValueError(
                    "targets that are divided must be as many as the micro-batches of the input "
                    f"(argument: {path}, entries: {len(leaf)}, micro-batches: {m}); divide both in "
                    "the same way"
                )
            if (count := rows_in(leaf)) is not None:
                found[path] = count, leaf
    if division.is_ready and found:
        # The input does not say how many rows there are, so the first target does.
        (path, (rows, _)), *_ = found.items()
        if rows < m:
            raise ValueError(
                "targets must have a row for each micro-batch that Chunks has made (argument: "
                f"{path}, rows: {rows}, micro-batches: {m}); divide them, too, or pass "
                "torchgpipe.NoChunk(value)"
            )
        division = division._replace(sizes=divided(rows, m))
    for path, (count, leaf) in found.items() if m > 1 else ():
        if count != rows:
            shape = getattr(getattr(leaf, "value", leaf), "shape", (count,))
            raise ValueError(
                "targets must have as many rows as the input, since each micro-batch takes "
                f"the same rows of all (argument: {path}, shape: {tuple(shape)}, rows: {rows}); "
                "pass what every micro-batch shall get whole as torchgpipe.NoChunk(value), and "
                "what has its rows in another dimension as torchgpipe.Chunk(tensor, dim=1)"
            )
    entries = [x for name, one in each for x in lists(one, name)] if rows and m > 1 else []
    if unsplit := [path for path, length in entries if length == rows]:
        raise ValueError(
            "targets must be tensors to be split into micro-batches "
            f"(lists or arrays with an entry for each row: {', '.join(unsplit)}, rows: {rows}); "
            "pass a tensor, what every micro-batch shall get whole as torchgpipe.NoChunk(value), "
            "or what is divided already as torchgpipe.Chunks(values)"
        )
    value, events = fetched(pool, value, device)
    if m == 1:
        # One micro-batch gets all as it is.
        return [trees.map_leaves(_whole, value)], events
    return [*split(value, division, rows)], events


def _path(name: str, path: str) -> str:
    """The path to a leaf of an argument: its name alone, if it is the leaf."""
    if path == "the value":
        return name
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


def _tensors(leaf: Any) -> Iterator[Tensor]:
    """The tensors of a leaf, which may be marked."""
    value = leaf.values if isinstance(leaf, Chunks) else getattr(leaf, "value", leaf)
    if is_of_input(leaf) or isinstance(leaf, list):
        yield from (x for x in trees.leaves_of(value) if isinstance(x, Tensor))
    elif isinstance(leaf, Tensor):
        yield leaf


def _whole(leaf: Any) -> Any:
    if isinstance(leaf, Chunks):
        return leaf.values[0]
    return leaf.value if is_of_input(leaf) else leaf
