"""Division of a mini-batch: which rows and which objects each micro-batch gets.

A tensor is split along dimension 0, unless it is marked. A list with one tensor per row, such as
images of several sizes, or with one mapping of tensors per row, such as the objects in each image,
is sliced as a list, and its tensors are not split. Where no tensor beside such lists tells how many
rows there are, two lists of one length do, unless all in them are tensors of one size. The entries
of :class:`~torchgpipe.Chunks` go to one micro-batch each. All other objects, 0-dimensional tensors
and values marked by :class:`~torchgpipe.NoChunk` go whole into every micro-batch.
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
        has_lists: whether a list is divided, whose tensors may have any shapes.
        is_listed: whether nothing but lists is divided.
    """

    sizes: list[int]
    is_given: bool = False
    has_lists: bool = False
    is_listed: bool = False

    @property
    def m(self) -> int:
        """The number of micro-batches."""
        return len(self.sizes)

    @property
    def is_varied(self) -> bool:
        """Whether micro-batches with as many rows may differ in their shapes."""
        return self.is_given or self.has_lists

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
    divisible, given, sparse = _looked_at(value)
    if sparse and max(chunks, *given.values(), 1) > 1:
        raise ValueError(
            "only dense tensors can be split into micro-batches "
            f"({'; '.join(sparse)}); pass a dense one, divide it yourself, as torchgpipe.Chunks("
            "[first, second]), mark it by torchgpipe.NoChunk, or set chunks=1"
        )
    if len({*given.values()}) > 1:
        raise ValueError(
            "all Chunks of a call must have the same length, the number of micro-batches "
            f"(lengths: {given}); pass None for a micro-batch that has no value"
        )
    if len({*map(rows_in, divisible.values())}) > 1:
        shapes = {
            name: tuple(getattr(getattr(x, "value", x), "shape", (rows_in(x),)))
            for name, x in divisible.items()
        }
        raise ValueError(
            "all input tensors must have the same size in dimension 0, since each micro-batch "
            f"takes the same rows of all (shapes: {shapes}); "
            "expand the smaller ones, or pass what every micro-batch shall get whole as "
            "torchgpipe.NoChunk(tensor), what has its rows in another dimension as "
            "torchgpipe.Chunk(tensor, dim=1), and what is divided already as "
            "torchgpipe.Chunks([first, second])"
        )
    if not divisible and not given and chunks > 1:
        raise ValueError(
            "there must be an input tensor to split into micro-batches along dimension 0 "
            f"(tensors with a dimension and without NoChunk: 0, chunks: {chunks}); give it one "
            "with unsqueeze(0), or set chunks=1"
        )
    rows = next(map(rows_in, divisible.values()), None) or 0
    m = next(iter(given.values()), max(1, min(rows, chunks)))
    if given and divisible and rows < m:
        raise ValueError(
            "what is not marked must have a row for each micro-batch that Chunks has made "
            f"(rows: {rows}, micro-batches: {m}); divide it, too, or pass torchgpipe.NoChunk(value)"
        )
    found = [type(x) is list for x in divisible.values()]
    return Division(divided(rows, m), bool(given), any(found), bool(found) and all(found))


def _looked_at(value: Any) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """Inspect the leaves of a mini-batch.

    Returns:
        The leaves that have rows; the length of each :class:`Chunks`; messages about sparse and
        nested tensors, which cannot be split.
    """
    divisible, given, sparse = {}, {}, []
    for name, leaf in names(value, leaves_in(value)):
        if isinstance(leaf, Chunks):
            given[name] = len(leaf)
        elif isinstance(leaf, Tensor) and leaf.dim() and not is_dense(leaf):
            sparse.append(f"input: {name}, layout: {'nested' if leaf.is_nested else leaf.layout}")
        elif rows_in(leaf) is not None:
            divisible[name] = leaf
        elif not isinstance(leaf, NoChunk | Tensor):
            verify_leaf(leaf)
    return divisible, given, sparse


def leaves_in(value: Any, rows: int | None = None) -> Callable[[Any], bool]:
    """Make a predicate that tells leaves from containers: marks, and lists with an entry per row.

    Args:
        value: the value.
        rows: the number of its rows; by default taken from the leaves that are not lists. If there
            are none, two lists or more of one length have an entry for each row, unless all are
            tensors with the same size in dimension 0. Any other list is a container then.
    """
    if isinstance(value, Tensor):
        return is_of_input
    found = leaves_of(value, lambda x: is_of_input(x) or is_flat(x))
    lengths = {len(x) for x in found if is_list_of_rows(x)}
    if not lengths:
        return is_of_input
    is_list = is_list_of_rows
    if rows is None:
        rows = next((rows_in(x) for x in found if type(x) is not list and rows_in(x)), None)
    if rows is None:
        (length, *others), listed = lengths, [x for x in found if is_flat(x)]
        entries = [entry for x in listed if len(x) == length for entry in x]
        sizes = {rows_in(x) if isinstance(x, Tensor) else -1 for x in entries} - {None}
        if not others and len(entries) > length and (-1 in sizes or len(sizes) > 1):
            rows, is_list = length, is_flat
        else:
            # A container beside the list may have a tensor.
            tensors = leaves_of([x for x in listed if not is_list_of_rows(x)], is_of_input)
            rows = next(filter(None, map(rows_in, tensors)), 0)
    return lambda x: is_of_input(x) or (is_list(x) and len(x) == rows)


def is_flat(value: Any) -> bool:
    """Whether a value is a list of tensors, mappings, and objects without tensors, in any mixture.

    A list with marks is none, since they divide what is in it, nor is a shape, a few integers.
    """
    return (
        type(value) is list
        and not any(map(is_of_input, leaves_of(value, is_of_input)))
        and not (len(value) < 4 and all(isinstance(x, int) for x in value))
        and all(
            isinstance(x, Tensor | Mapping)
            or not any(isinstance(leaf, Tensor) for leaf in leaves_of(x))
            for x in value
        )
    )


def is_list_of_rows(value: Any) -> bool:
    """Whether a value is a list that may have an entry for each row: tensors, or mappings of them.

    A list of numbers, as of learned scales, has none.
    """
    return is_flat(value) and all(map(tensors_of_row, value))


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
    return len(leaf) if type(leaf) is list else None


def has_chunks(value: Any) -> bool:
    """Whether a value contains a :class:`Chunks` mark."""
    return any(isinstance(x, Chunks) for x in leaves_of(value, is_of_input))


def row_count(value: Any) -> int:
    """The number of rows of a value; 0 if it has none."""
    found = (rows_in(leaf) for _, leaf in names(value, leaves_in(value)))
    return next((rows for rows in found if rows is not None), 0)


def split(value: Any, division: Division, rows: int | None = None) -> Iterator[Any]:
    """Generate the value of each micro-batch."""
    sizes = division.sizes
    starts = [*accumulate(sizes, initial=0)]
    if isinstance(value, Tensor) and value.dim() and is_dense(value):
        # No container to look into.
        yield from (_rows(value, 0, start, size) for start, size in zip(starts, sizes))
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
        return _rows(tensor, dim, starts[i], sizes[i])

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
    return isinstance(leaf, Chunk | Chunks) or type(leaf) is list


def _rows(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    # Detached where no gradient is needed: torch.compile would compile a graph per base of a view.
    rows = tensor.narrow(dim, start, size)
    return rows if rows.requires_grad or _torch.forward_level() >= 0 else rows.detach()
