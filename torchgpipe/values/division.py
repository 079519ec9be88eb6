"""Division of a mini-batch: which rows and which objects each micro-batch gets.

A tensor is split along dimension 0, unless it is marked. A list with one tensor per row, such as
images of several sizes, or with one mapping of tensors per row, such as the objects in each image,
is sliced as a list, and its tensors are not split. Where no tensor beside such lists tells how many
rows there are, two lists of one length do, unless all in them are tensors of one size. The entries
of :class:`~torchgpipe.Chunks` go to one micro-batch each. All other objects, 0-dimensional tensors
and values marked by :class:`~torchgpipe.NoChunk` go whole into every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe import _torch
from torchgpipe.values.marks import Chunk, Chunks, NoChunk, is_mark, is_marked
from torchgpipe.values.structure import (
    ATOMS,
    IsLeaf,
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


def rows_in(leaf: Any) -> int | None:
    """The number of rows that a leaf has; None if it is not divided by rows."""
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.dim() and is_dense(leaf) else None
    if isinstance(leaf, Chunk):
        return int(leaf.value.shape[leaf.dim])
    return len(leaf) if type(leaf) is list else None


class FlatInput:
    """The input of a wrapped model, or the targets of a loss, flattened once.

    What checks an input, and what divides it, reads the leaves: tensors, marks, lists with an entry
    for each row, and other objects, in order. Their types say how they are divided.

    Args:
        value: a nested structure of tensors of shapes ``(rows, ...)`` with the same ``rows``,
            marked values and other objects.
        rows: the number of rows, where it is known; by default, leaves tell it.

    Raises:
        TypeError: the value has a :class:`~torchgpipe.PerMicroBatch` mark.
    """

    def __init__(self, value: Any, rows: int | None = None) -> None:
        self.value = value
        self.is_leaf: IsLeaf = is_of_input
        self.leaves, self.spec = flatten_tree(value, lambda x: is_mark(x) or is_flat(x))
        if any(map(is_marked, self.leaves)):
            raise TypeError(
                "PerMicroBatch marks outputs, so it belongs in what layers return, and neither in "
                f"an input nor in targets (leaves: {len(self.leaves)}); pass the value itself, or "
                "torchgpipe.NoChunk(value) if every micro-batch shall get all of it"
            )
        if any(type(x) is list for x in self.leaves):
            self.is_leaf = _leaf_test(self.leaves, rows)
            self.leaves, self.spec = flatten_tree(value, self.is_leaf)

    @cached_property
    def names(self) -> list[str]:
        """The path to each leaf, for messages."""
        return [name for name, _ in names(self.value, self.is_leaf)]

    def named(self, test: Callable[[Any], bool]) -> dict[str, Any]:
        """The leaves for which a test holds, by the paths to them."""
        return {self.names[k]: x for k, x in enumerate(self.leaves) if test(x)}

    @property
    def counts(self) -> list[int]:
        """The number of rows of each leaf that has rows."""
        return [n for x in self.leaves if (n := rows_in(x)) is not None]

    @property
    def rows(self) -> int:
        """The number of rows; 0 if nothing has rows."""
        return next(iter(self.counts), 0)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf that has rows, by the path to it; of a list, its length."""
        leaves = self.named(lambda x: rows_in(x) is not None)
        tensors = [(name, x.value if isinstance(x, Chunk) else x) for name, x in leaves.items()]
        return {name: tuple(getattr(x, "shape", (len(x),))) for name, x in tensors}

    @property
    def objects(self) -> list[Any]:
        """The leaves that go whole, and are no tensors, numbers or texts."""
        others = [x for x in self.leaves if type(x) not in ATOMS and not self.is_leaf(x)]
        return [x for x in others if not isinstance(x, Tensor)]

    @property
    def given(self) -> list[int]:
        """The length of each :class:`~torchgpipe.Chunks`, by which the caller has divided."""
        return [len(x) for x in self.leaves if isinstance(x, Chunks)]

    def verify_dense(self, m: int, path: Callable[[str], str] = "input: {}".format) -> None:
        """Check that ``m`` micro-batches can be made of each tensor.

        Raises:
            ValueError: a tensor is sparse or nested.
        """
        sparse = self.named(lambda x: isinstance(x, Tensor) and x.dim() > 0 and not is_dense(x))
        if sparse and m > 1:
            layouts = [
                f"{path(name)}, layout: {'nested' if x.is_nested else x.layout}"
                for name, x in sparse.items()
            ]
            raise ValueError(
                "only dense tensors can be split into micro-batches "
                f"({'; '.join(layouts)}); pass a dense one, divide it yourself, as "
                "torchgpipe.Chunks([first, second]), mark it by torchgpipe.NoChunk, or set chunks=1"
            )

    def division(self, chunks: int) -> Division:
        """Decide how to divide a mini-batch.

        Returns:
            ``min(rows, chunks)`` micro-batches, but one if the mini-batch is empty; or as many as
            the caller has made. Sizes differ by at most one row, the larger ones first.

        Raises:
            TypeError: the value holds tensors in something that is no known container.
            ValueError: there is no tensor to divide, tensors differ in their number of rows, or
                several :class:`Chunks` differ in length.
        """
        for x in self.objects:
            verify_leaf(x)
        counts, lengths = self.counts, {*self.given}
        rows = next(iter(counts), 0)
        self.verify_dense(max(chunks, *lengths, 1))
        if len(lengths) > 1:
            entries = {k: len(x) for k, x in self.named(lambda x: isinstance(x, Chunks)).items()}
            raise ValueError(
                "all Chunks of a call must have the same length, the number of micro-batches "
                f"(lengths: {entries}); pass None for a micro-batch that has no value"
            )
        if len({*counts}) > 1:
            raise ValueError(
                "all input tensors must have the same size in dimension 0, since each micro-batch "
                f"takes the same rows of all (shapes: {self.shapes}); "
                "expand the smaller ones, or pass what every micro-batch shall get whole as "
                "torchgpipe.NoChunk(tensor), what has its rows in another dimension as "
                "torchgpipe.Chunk(tensor, dim=1), and what is divided already as "
                "torchgpipe.Chunks([first, second])"
            )
        if not counts and not lengths and chunks > 1:
            raise ValueError(
                "there must be an input tensor to split into micro-batches along dimension 0 "
                f"(tensors with a dimension and without NoChunk: 0, chunks: {chunks}); give it one "
                "with unsqueeze(0), or set chunks=1"
            )
        m = next(iter(lengths), max(1, min(rows, chunks)))
        if lengths and counts and rows < m:
            raise ValueError(
                "what is not marked must have a row for each micro-batch that Chunks has made "
                f"(rows: {rows}, micro-batches: {m}); divide it, too, or pass "
                "torchgpipe.NoChunk(value)"
            )
        lists = sum(type(x) is list for x in self.leaves)
        return Division(divided(rows, m), bool(lengths), lists > 0, 0 < lists == len(counts))

    def parts(self, division: Division) -> Iterator[list[Any]]:
        """Generate what each micro-batch has in place of the leaves."""
        spans = [*zip(accumulate(division.sizes, initial=0), division.sizes)]
        aliases: dict[int, Tensor] = {}

        def alias(x: Any) -> Any:
            # All micro-batches get one view of a whole tensor. The derivative of narrow() is a new
            # tensor, so autograd adds their gradients on the caller's stream and in its memory, as
            # it does for rows. Without narrow() it would use the stream of the first gradient.
            if not (isinstance(x, Tensor) and x.requires_grad and is_dense(x)):
                return x
            if id(x) not in aliases:
                aliases[id(x)] = x.unsqueeze(0).narrow(0, 0, 1).squeeze(0)
            return aliases[id(x)]

        def parts_of(leaf: Any) -> Any:
            if isinstance(leaf, Chunks):
                return leaf.value
            if type(leaf) is list:
                return [leaf[start : start + size] for start, size in spans]
            if rows_in(leaf) is None:
                whole = leaf.value if isinstance(leaf, NoChunk) else leaf
                return [map_leaves(alias, whole)] * division.m
            tensor, dim = (leaf.value, leaf.dim) if isinstance(leaf, Chunk) else (leaf, 0)
            # narrow() and not split(), whose results autograd forbids layers to change in place.
            rows = [tensor.narrow(dim, start, size) for start, size in spans]
            # Parts that need no gradient are detached: for views torch.compile would compile layers
            # again when mini-batches change their size. Forward mode (``dual``) needs the views,
            # since detach() drops tangents.
            dual = _torch.forward_level() >= 0
            return [x if x.requires_grad or dual else x.detach() for x in rows]

        # The keys are identities, so that a tensor that occurs twice in the input stays one object.
        parts = {id(x): parts_of(x) for x in self.leaves}
        for i in range(division.m):
            yield [parts[id(x)][i] for x in self.leaves]

    def split(self, division: Division) -> Iterator[Any]:
        """Generate the value of each micro-batch."""
        return map(self.spec.unflatten, self.parts(division))

    @property
    def whole(self) -> Any:
        """The value without marks, as one micro-batch gets it."""
        parts = [x.value[0] if isinstance(x, Chunks) else x for x in self.leaves]
        return self.spec.unflatten([x.value if is_of_input(x) else x for x in parts])

    def map(self, function: Callable[[Any], Any]) -> None:
        """Put a function of each tensor, and of each other object, in its place."""
        self.leaves = [
            x.map(function) if is_of_input(x) else map_leaves(function, x) for x in self.leaves
        ]


def row_count(value: Any) -> int:
    """The number of rows of a value; 0 if it has none."""
    return FlatInput(value).rows


def _leaf_test(leaves: Sequence[Any], rows: int | None) -> IsLeaf:
    """Make a predicate that tells leaves from containers: marks, and lists with an entry per row.

    Args:
        leaves: the leaves, if all flat lists are leaves.
        rows: the number of rows; by default taken from the leaves that are not lists. If there are
            none, two lists or more of one length have an entry for each row, unless all are
            tensors with the same size in dimension 0. Any other list is a container then.
    """
    listed, is_list = [x for x in leaves if type(x) is list], is_list_of_rows
    lengths = {len(x) for x in listed if is_list(x)}
    if not lengths:
        return is_of_input
    rows = rows or next((n for x in leaves if type(x) is not list and (n := rows_in(x))), None)
    if rows is None:
        length, *others = lengths
        entries = [entry for x in listed if len(x) == length for entry in x]
        sizes = {rows_in(x) if isinstance(x, Tensor) else -1 for x in entries} - {None}
        if not others and len(entries) > length and (-1 in sizes or len(sizes) > 1):
            rows, is_list = length, is_flat
        else:
            # No leaf tells the number of rows. A tensor may, in a list that is a container since it
            # has entries without rows.
            inner = leaves_of([x for x in listed if not is_list_of_rows(x)], is_of_input)
            rows = next((n for x in inner if (n := rows_in(x))), 0)
    return lambda x: is_of_input(x) or (is_list(x) and len(x) == rows)


def is_flat(value: Any) -> bool:
    """Whether a value is a list of tensors, mappings, and objects without tensors, in any mixture.

    A list with marks is none, since they divide what is in it, nor is a shape, a few integers.
    """
    if type(value) is not list or is_shape(value):
        return False
    for x in value:
        if not isinstance(x, Tensor) and type(x) not in ATOMS:
            leaves = leaves_of(x, is_mark)
            others = () if isinstance(x, Mapping) else leaves
            if any(map(is_mark, leaves)) or any(isinstance(leaf, Tensor) for leaf in others):
                return False
    return True


def is_shape(value: Sequence[Any]) -> bool:
    """Whether a list or tuple is a few integers, or empty."""
    return len(value) < 4 and all(isinstance(x, int) for x in value)


def is_list_of_rows(value: Any) -> bool:
    """Whether a value is a list that may have an entry for each row: tensors, or mappings of them.

    A list of numbers, as of learned scales, has none.
    """
    return is_flat(value) and all(map(tensors_of_row, value))


def tensors_of_row(entry: Any) -> list[Tensor]:
    """The tensors of one entry of such a list."""
    values = entry.values() if isinstance(entry, Mapping) else [entry]
    return [x for x in values if isinstance(x, Tensor) and x.dim() > 0]
