"""The outputs of slices, joined along positions and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.mapped.lazy_outputs import can_fill_itself, on_reading, there
from torchgpipe.values.structure import flatten_tree

__all__: list[str] = []

#: For one micro-batch: the number of rows, and the lengths of its slices in tokens.
Extent: TypeAlias = tuple[int, Sequence[int]]


def joined(outputs: Sequence[Any], sizes: Sequence[Extent] | Extent, left_out: int = 0) -> Any:
    """Join outputs of slices.

    Args:
        outputs: the outputs, micro-batch by micro-batch.
        sizes: the sizes of the micro-batches, whose losses are stacked; or that of the only one.
        left_out: how many tokens at the end of a row have no output.
    """
    if not can_fill_itself(outputs[0]):
        return _joined([*outputs], sizes, left_out)
    values = [there(x) for x in outputs]
    ready = {
        name: _joined([x[name] for x in values], sizes, left_out)
        for name, x in values[0].items()
        if not (isinstance(x, Tensor) and x.dim())
    }

    def make() -> dict[str, Any]:
        names = [name for name in outputs[0] if name not in ready]
        return {name: _joined([x[name] for x in outputs], sizes, left_out) for name in names}

    return on_reading(outputs[0], ready, make)


def _joined(values: list[Any], sizes: Sequence[Extent] | Extent, left_out: int) -> Any:
    columns = [flatten_tree(x) for x in values]
    leaves = [_joined_leaf(column, sizes, left_out) for column in zip(*[x for x, _ in columns])]
    return columns[0][1].unflatten(leaves)


def _joined_leaf(column: Sequence[Any], sizes: Sequence[Extent] | Extent, left_out: int) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    if isinstance(sizes, tuple):
        rows, lengths = sizes
        return _joined_slices([*column], rows, lengths, left_out)
    rest = iter(column)
    parts = [_joined_slices([next(rest) for _ in x[1]], *x, left_out) for x in sizes]
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


def _joined_slices(parts: list[Tensor], rows: int, lengths: Sequence[int], left_out: int) -> Tensor:
    if not parts[0].dim():
        return torch.stack(parts).mean(0)
    if all(x.shape[:2] == (rows, size) for x, size in zip(parts, lengths)):
        output = torch.cat(parts, 1)
        return output[:, :-left_out] if left_out else output
    if all(x.shape[0] == rows * size for x, size in zip(parts, lengths)):
        # Rows and positions are one dimension, as in what routers of experts return.
        return torch.cat([x.unflatten(0, (rows, -1)) for x in parts], 1).flatten(0, 1)
    raise ValueError(
        "outputs of slices have rows in dimension 0 and positions in dimension 1, by which "
        f"they are joined (shapes: {[tuple(x.shape) for x in parts]}, rows: {rows}, "
        f"lengths of slices: {[*lengths]}); use slices=1 to get this output"
    )
