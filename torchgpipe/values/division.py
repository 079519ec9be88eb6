"""Division of a mini-batch: which rows and which objects each micro-batch gets.

A tensor is split along dimension 0, unless it is marked. A list with one tensor per row, such as
images of several sizes, or with one mapping of tensors per row, such as the objects in each image,
is sliced as a list, and its tensors are not split. The entries of
:class:`~torchgpipe.Chunks` go to one micro-batch each. All other objects, 0-dimensional tensors and
values marked by :class:`~torchgpipe.NoChunk` go whole into every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe import _torch
from torchgpipe.values.marks import Chunk, Chunks, NoChunk, is_marked
from torchgpipe.values.structure import (
    flatten_tree,
    is_dense,
    is_of_input,
    leaves_of,
    map_leaves,
    names,
    verify_leaf,
)

__all__: list[str] = []


class Division(NamedTuple):
    """The division of a mini-batch.

    Args:
        sizes: the number of rows of each micro-batch; 0 where nothing has rows.
        is_given: whether the caller has divided a value by :class:`~torchgpipe.Chunks`.
    """

    sizes: list[int]
    is_given: bool = False

    @property
    def m(self) -> int:
        """The number of micro-batches."""
        return len(self.sizes)

    @property
    def is_ready(self) -> bool:
        """Whether the caller has divided everything, so that no rows are left to split."""
        return self.is_given and not any(self.sizes)

    @property
    def rows(self) -> list[int]:
        """The number of rows of each micro-batch; empty if outputs are not joined by rows.

        One micro-batch may have no rows.
        """
        return [] if self.m == 1 or self.is_ready else self.sizes


def divided(rows: int, m: int) -> list[int]:
    """Divide rows among ``m`` micro-batches; return their sizes, which differ by at most one."""
    size, larger = divmod(rows, m)
    return [size + (i < larger) for i in range(m)]


def division_of(value: Any, chunks: int) -> Division:
    """Decide how to divide a mini-batch.

    Args:
        value: a nested structure of tensors of shapes ``(rows, ...)`` with the same ``rows``,
            marked values and other objects.
        chunks: the number of micro-batches to make, at least 1, where the caller has divided
            nothing.

    Returns:
        ``min(rows, chunks)`` micro-batches, but one if the mini-batch is empty; or as many as the
        caller has made. Sizes differ by at most one row, the larger ones first.

    Raises:
        TypeError: the value holds tensors in something that is no known container, or has a
            :class:`~torchgpipe.PerMicroBatch` mark.
        ValueError: there is no tensor to divide, tensors differ in their number of rows, or several
            :class:`Chunks` differ in length.
    """
    if not isinstance(value, Tensor) and any(map(is_marked, leaves_of(value, is_marked))):
        raise TypeError(
            "PerMicroBatch marks outputs, so it belongs in what layers return "
            f"(input: {type(value).__name__}); pass the value itself, or "
            "torchgpipe.NoChunk(value) if every micro-batch shall get all of it"
        )
    shapes, given, sparse = _looked_at(value)
    if sparse and max(chunks, *given.values(), 1) > 1:
        raise ValueError(
            "only dense tensors can be split into micro-batches "
            f"({'; '.join(sparse)}); pass a dense one, mark it by torchgpipe.NoChunk, or set "
            "chunks=1"
        )
    if len({*given.values()}) > 1:
        raise ValueError(
            "all Chunks of a call must have the same length, the number of micro-batches "
            f"(lengths: {given}); pass None for a micro-batch that has no value"
        )
    if len({rows for rows, _ in shapes.values()}) > 1:
        raise ValueError(
            "all input tensors must have the same size in dimension 0, since each micro-batch "
            f"takes the same rows of all (shapes: { {k: x for k, (_, x) in shapes.items()} }); "
            "expand the smaller ones, or pass what every micro-batch shall get whole as "
            "torchgpipe.NoChunk(tensor), what has its rows in another dimension as "
            "torchgpipe.Chunk(tensor, dim=1), and what is divided already as "
            "torchgpipe.Chunks([first, second])"
        )
    if not shapes and not given and chunks > 1:
        raise ValueError(
            "there must be an input tensor to split into micro-batches along dimension 0 "
            f"(tensors with a dimension and without NoChunk: 0, chunks: {chunks}); give it one "
            "with unsqueeze(0), or set chunks=1"
        )
    rows = next(iter(shapes.values()))[0] if shapes else 0
    m = next(iter(given.values()), max(1, min(rows, chunks)))
    if given and shapes and rows < m:
        raise ValueError(
            "what is not marked must have a row for each micro-batch that Chunks has made "
            f"(rows: {rows}, micro-batches: {m}); divide it, too, or pass torchgpipe.NoChunk(value)"
        )
    return Division(divided(rows, m), bool(given))


def _looked_at(
    value: Any,
) -> tuple[dict[str, tuple[int, tuple[int, ...]]], dict[str, int], list[str]]:
    """Inspect the leaves of a mini-batch.

    Returns:
        The rows and the shape of each leaf that has rows; the length of each :class:`Chunks`;
        messages about sparse and nested tensors, which cannot be split.
    """
    shapes, given, sparse = {}, {}, []
    for name, leaf in names(value, leaves_in(value)):
        if isinstance(leaf, Chunks):
            given[name] = len(leaf)
        elif isinstance(leaf, Tensor) and leaf.dim() and not is_dense(leaf):
            sparse.append(f"input: {name}, layout: {'nested' if leaf.is_nested else leaf.layout}")
        elif (rows := rows_in(leaf)) is not None:
            tensor = leaf.value if isinstance(leaf, Chunk) else leaf
            shapes[name] = rows, tuple(getattr(tensor, "shape", (rows,)))
        elif not isinstance(leaf, NoChunk | Tensor):
            verify_leaf(leaf)
    return shapes, given, sparse


def leaves_in(value: Any, rows: int | None = None) -> Callable[[Any], bool]:
    """Make a predicate that tells leaves from containers: marks, and lists with an entry per row.

    Args:
        value: the value.
        rows: the number of its rows; by default taken from the leaves that are not lists. If there
            are none, these lists are containers like any other.
    """
    if isinstance(value, Tensor):
        return is_of_input
    found = leaves_of(value, lambda x: is_of_input(x) or is_list_of_rows(x))
    if not any(map(is_list_of_rows, found)):
        return is_of_input
    if rows is None:
        rows = next((rows_in(x) for x in found if rows_in(x) and not is_list_of_rows(x)), 0)
    return lambda x: is_of_input(x) or (is_list_of_rows(x) and len(x) == rows)


def is_list_of_rows(value: Any) -> bool:
    """Whether a value is a list that may have an entry for each row: tensors, or mappings of them.

    A list of numbers, as of learned scales, has none, nor has one with marks, which divide what is
    in it.
    """
    return (
        type(value) is list
        and bool(value)
        and all(map(tensors_of_row, value))
        and not any(map(is_of_input, leaves_of(value, is_of_input)))
    )


def tensors_of_row(entry: Any) -> list[Tensor]:
    """The tensors of one entry of such a list."""
    values = entry.values() if isinstance(entry, Mapping) else [entry]
    return [x for x in values if isinstance(x, Tensor) and x.dim() > 0]


def rows_in(leaf: Any) -> int | None:
    """The number of rows that a leaf has; None if it is not divided by rows."""
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.dim() else None
    if isinstance(leaf, Chunk):
        return leaf.value.shape[leaf.dim]
    return len(leaf) if is_list_of_rows(leaf) else None


def has_chunks(value: Any) -> bool:
    """Whether a value contains a :class:`Chunks` mark."""
    return any(isinstance(x, Chunks) for x in leaves_of(value, is_of_input))


def row_count(value: Any) -> int:
    """The number of rows of a value; 0 if it has none."""
    found = (rows_in(leaf) for _, leaf in names(value, leaves_in(value)))
    return next((rows for rows in found if rows is not None), 0)


def split(value: Any, division: Division, rows: int | None = None) -> Iterator[Any]:
    """Generate the value of each micro-batch.

    Args:
        value: the mini-batch, or something else with as many rows.
        division: its division.
        rows: the number of rows, where another value determines it.
    """
    sizes = division.sizes
    starts = [*accumulate(sizes, initial=0)]
    if isinstance(value, Tensor) and value.dim() and is_dense(value):
        # No container to look into.
        differentiated = _torch.forward_level() >= 0
        for start, size in zip(starts, sizes):
            yield _rows(value, 0, start, size, differentiated)
        return
    leaves, spec = flatten_tree(value, leaves_in(value, rows))
    aliases: dict[int, Tensor] = {}

    def alias(x: Any) -> Any:
        # The derivative of narrow() is a new tensor, so autograd adds the gradients of all
        # micro-batches on the caller's stream and in its memory, as it does for rows. Without
        # narrow() it would add on the stream of whichever gradient comes first.
        if not (isinstance(x, Tensor) and x.requires_grad and is_dense(x)):
            return x
        if id(x) not in aliases:
            aliases[id(x)] = x.unsqueeze(0).narrow(0, 0, 1).squeeze(0)
        return aliases[id(x)]

    def part(leaf: Any, i: int) -> Any:
        # narrow() and not split(), since autograd forbids to change a view of split() in place.
        if isinstance(leaf, Chunks):
            return leaf.values[i]
        if isinstance(leaf, list):
            return leaf[starts[i] : starts[i + 1]]
        tensor, dim = (leaf.value, leaf.dim) if isinstance(leaf, Chunk) else (leaf, 0)
        return _rows(tensor, dim, starts[i], sizes[i], _torch.forward_level() >= 0)

    # A tensor that occurs several times stays one object.
    own = {id(x): x for x in leaves if _is_divided(x)}
    whole = [
        x if id(x) in own else map_leaves(alias, x.value if isinstance(x, NoChunk) else x)
        for x in leaves
    ]
    for i in range(division.m):
        parts = {key: part(x, i) for key, x in own.items()}
        yield spec.unflatten([parts.get(id(x), other) for x, other in zip(leaves, whole)])


def _is_divided(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and is_dense(leaf)
    return isinstance(leaf, Chunk | Chunks) or is_list_of_rows(leaf)


def _rows(tensor: Tensor, dim: int, start: int, size: int, differentiated: bool) -> Tensor:
    # Detached where no gradient is needed: torch.compile would compile a graph per base of a view.
    rows = tensor.narrow(dim, start, size)
    return rows if rows.requires_grad or differentiated else rows.detach()
