"""Micro-batches: a mini-batch is scattered into them, and their outputs are gathered again.

Nested structures stop here: everything below a :class:`Batch` sees a flat tuple of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product, starmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchgpipe.values.structure import (
    ALONE,
    Arguments,
    NoChunk,
    Tensors,
    flatten,
    is_dense,
    is_split,
    names,
    split,
    verify_leaf,
)

__all__: list[str] = []

#: The key of the value among the parts of a micro-batch.
VALUE = None


class Batch:
    """One micro-batch at the entrance of a partition, or at its exit.

    Args:
        value: what a layer takes and gives: any nested structure.
        skips: what passes by layers, by some key each: likewise.

    Raises:
        TypeError: the value holds tensors in something that is no known container.
    """

    __slots__ = ("_single", "parts", "shared", "structures")

    def __init__(self, value: Any, skips: Mapping[Any, Any] | None = None) -> None:
        tensors, structure = flatten(value)
        #: The tensors of the value, and of each skip.
        self.parts: dict[Any, Tensors] = {VALUE: tensors}
        #: What these are in.
        self.structures = {VALUE: structure}
        for key, skip in (skips or {}).items():
            self.parts[key], self.structures[key] = flatten(skip)
        # Most are. All else in this class holds for any, but takes its time.
        self._single = len(tensors) == len(self.parts) == 1
        #: The parts with a tensor that shares memory with another one.
        self.shared: frozenset[Any] = frozenset() if self._single else self._aliased()

    @property
    def atomic(self) -> bool:
        """Whether the value is a tensor alone."""
        return self.structures[VALUE] is ALONE

    @property
    def value(self) -> Any:
        """The micro-batch as layers see it."""
        return self.structures[VALUE].unflatten(self.parts[VALUE])

    @property
    def skips(self) -> dict[Any, Any]:
        """What passes by layers."""
        return {
            key: self.structures[key].unflatten(tensors)
            for key, tensors in self.parts.items()
            if key is not VALUE
        }

    @property
    def tensors(self) -> Tensors:
        """All tensors, each once: those of the value, then those of the skips."""
        return self.parts[VALUE] if self._single else _distinct(self.parts.values())

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient will be asked of one of the tensors."""
        if self._single:
            return self.parts[VALUE][0].requires_grad
        return any(tensor.requires_grad for tensor in self.tensors)

    def call(self, function: Callable[..., Any]) -> Batch:
        """The micro-batch that a layer makes of this one."""
        value = self.value
        if not isinstance(value, Arguments):
            return Batch(function(value))
        return Batch(function(*value.args, **value.kwargs))

    def with_skips(self, skips: Mapping[Any, Any], shared: Iterable[Any] = ()) -> Batch:
        """The same value beside other skips.

        Args:
            skips: what passes by layers.
            shared: those of them that share memory with what is elsewhere by now.
        """
        if not skips and len(self.parts) == 1:
            return self
        batch = Batch(self.value, skips)
        batch.shared |= self.shared & {VALUE} | skips.keys() & set(shared)
        return batch

    def take(self) -> Batch:
        """The same micro-batch; this object lets go of it."""
        parts, self.parts = self.parts, {}
        return self._of(parts)

    def replace(self, tensors: Iterable[Tensor]) -> Batch:
        """The same micro-batch with others instead of its :attr:`tensors`."""
        return self.map(lambda *_: tensors, self.parts)

    def map(self, function: Callable[..., Iterable[Tensor]], parts: Iterable[Any]) -> Batch:
        """The same micro-batch, some parts replaced by what a function of their tensors gives.

        What is one tensor in several places stays one.
        """
        if self._single:
            for _ in parts:
                return self._of({VALUE: tuple(function(*self.parts[VALUE]))})
            return self
        chosen = {key: self.parts[key] for key in parts}
        found = _distinct(chosen.values())
        if not found:
            return self
        replaced = dict(zip(map(id, found), function(*found)))
        return self._of(
            self.parts
            | {key: tuple([replaced[id(tensor)] for tensor in old]) for key, old in chosen.items()}
        )

    def copy(self) -> Batch:
        """The same micro-batch, which can let go of it on its own."""
        return self._of(self.parts)

    def _of(self, parts: dict[Any, Tensors]) -> Batch:
        batch = object.__new__(Batch)
        batch.parts, batch.structures = parts, self.structures
        batch.shared, batch._single = self.shared, self._single
        return batch

    def aliases(self, other: Batch) -> bool:
        """Whether a tensor of this value shares memory with one of the other micro-batch."""
        return any(starmap(_is_alias_of, product(self.parts[VALUE], other.tensors)))

    def _aliased(self) -> frozenset[Any]:
        # One tensor in several places of the value stays one, but is another one as a skip.
        sharing: defaultdict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
        for key, part in self.parts.items():
            for x in _distinct([part]):
                sharing[_storage(x)].append((key, x))
        return frozenset(
            key
            for tensors in sharing.values()
            for (one, a), (other, b) in combinations(tensors, 2)
            if _is_alias_of(a, b)
            for key in (one, other)
        )

    def __repr__(self) -> str:
        return f"Batch({self.value!r})"

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]


def _distinct(parts: Iterable[Tensors]) -> Tensors:
    return tuple({id(tensor): tensor for tensor in chain.from_iterable(parts)}.values())


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        # Of sparse tensors, which have none, all are compared with each other.
        return 0


def _is_alias_of(a: Tensor, b: Tensor) -> bool:
    # Also of sparse tensors, which have no storage to compare. Torch's stubs do not know it.
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def check(value: Any) -> None:
    """Checks that a value can pass between partitions.

    Raises:
        TypeError: the value holds tensors in something that is no known container.
    """
    flatten(value)


def scatter(input: Any, chunks: int) -> list[Batch]:
    """Splits a mini-batch into micro-batches along dimension 0.

    Args:
        input: a nested structure of tensors of shapes ``(rows, ...)`` with the same ``rows``. What
            is marked by :class:`NoChunk`, tensors without a dimension, and what is no tensor,
            goes into every micro-batch as it is.
        chunks: how many micro-batches to make, at least 1.

    Returns:
        ``min(rows, chunks)`` micro-batches, but one of an empty mini-batch. Their sizes differ by
        at most one row, the larger ones first.

    Raises:
        TypeError: the input holds tensors in something that is no known container.
        ValueError: there is no tensor to split, or their numbers of rows differ.
    """
    shapes = {}
    for name, leaf in names(input):
        if is_split(leaf):
            if is_dense(leaf):
                shapes[name] = tuple(leaf.shape)
            elif chunks > 1:
                raise ValueError(
                    "only dense tensors can be split into micro-batches "
                    f"(input: {name}, layout: {'nested' if leaf.is_nested else leaf.layout}); pass "
                    "a dense one, mark it by torchgpipe.NoChunk, or set chunks=1"
                )
        elif not isinstance(leaf, NoChunk | Tensor):
            verify_leaf(leaf)
    if len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(
            "all input tensors must have the same size in dimension 0, since each micro-batch "
            f"takes the same rows of all (shapes: {shapes}); expand the smaller ones, or pass what "
            "every micro-batch shall get whole as torchgpipe.NoChunk(tensor)"
        )
    if not shapes and chunks > 1:
        raise ValueError(
            "there must be an input tensor to split into micro-batches along dimension 0 "
            f"(tensors with a dimension and without NoChunk: 0, chunks: {chunks}); give it one "
            "with unsqueeze(0), or set chunks=1"
        )
    rows = next(iter(shapes.values()))[0] if shapes else 1
    m = max(1, min(rows, chunks))
    size, larger = divmod(rows, m)
    return [Batch(part) for part in split(input, [size + (i < larger) for i in range(m)])]


def in_all(batches: Sequence[Batch]) -> list[Tensor]:
    """The tensors that all micro-batches have, if there are several."""
    if len(batches) < 2:
        return []
    others = {id(tensor) for tensor in batches[1]}
    return [tensor for tensor in batches[0] if id(tensor) in others]


def gather(outputs: Sequence[Batch]) -> Any:
    """Joins the outputs of all micro-batches along dimension 0: the inverse of :func:`scatter`.

    Tensors without a dimension are stacked, ``()`` to ``(m,)``. What is no tensor has to be equal
    in all.

    Raises:
        ValueError: the micro-batches differ in more than their tensors, or these in more than
            their first dimension.
    """
    first = outputs[0]
    for i, other in enumerate(outputs):
        _compare(first, other, i)
    joined: dict[tuple[int, ...], Tensor] = {}
    found = []
    for tensors in zip(*[batch.parts[VALUE] for batch in outputs]):
        # One tensor in several places stays one.
        key = tuple(map(id, tensors))
        if key not in joined:
            joined[key] = _joined(tensors)
        found.append(joined[key])
    return first.structures[VALUE].unflatten(tuple(found))


def _joined(tensors: Tensors) -> Tensor:
    if len({(x.dim(), x.shape[1:]) for x in tensors}) > 1:
        raise ValueError(
            "the outputs of all micro-batches must have the same shape but for dimension 0, along "
            f"which they are joined (shapes: {[tuple(x.shape) for x in tensors]}); have the last "
            "layer pad them to one length"
        )
    # Autocast has nothing to cast here, and would not join halves of another dtype than its own.
    with torch._C._DisableAutocast():
        if tensors[0].dim() == 0:
            return torch.stack(tensors)
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _compare(first: Batch, other: Batch, i: int) -> None:
    a, b = first.structures[VALUE], other.structures[VALUE]
    if a is b:
        if len(first.parts[VALUE]) == len(other.parts[VALUE]):
            return
    elif a.spec is not None and a.spec == b.spec and a.others.keys() == b.others.keys():
        for k, leaf in a.others.items():
            if not _same(leaf, b.others[k]):
                name = list(names(first.value))[k][0]
                raise ValueError(
                    "outputs that are no tensors must be equal for all micro-batches, since "
                    f"they cannot be joined (output: {name}, micro-batch 0: {leaf!r}, "
                    f"micro-batch {i}: {b.others[k]!r}); have the last layer return a tensor"
                )
        return
    raise ValueError(
        "the outputs of all micro-batches must have the same structure "
        f"(micro-batch 0: {_outline(first)}, micro-batch {i}: {_outline(other)}); have the last "
        "layer return the same structure whatever the batch size"
    )


def _same(a: Any, b: Any) -> bool:
    try:
        # What is not equal to itself, is not a number.
        return a is b or (type(a) is type(b) and bool(a == b or (a != a and b != b)))
    except Exception:
        # Arrays, for one, do not say in one word.
        return False


def _outline(batch: Batch) -> Any:
    return tree_map(lambda leaf: type(leaf).__name__, batch.value)
