"""Micro-batches: a mini-batch is scattered into them, and their outputs are gathered again.

Nested structures stop here: everything below a :class:`Batch` sees a flat tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, combinations, product, starmap
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__: list[str] = []

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors

#: The key of the value among the parts of a micro-batch.
VALUE = None


class Batch:
    """One micro-batch at the entrance of a partition, or at its exit.

    Args:
        value: what a layer takes and gives: a tensor, or a tuple of tensors.
        skips: what passes by layers, by some key each.

    Raises:
        TypeError: the value is neither a tensor nor a plain tuple of tensors.
    """

    __slots__ = ("_single", "atomic", "parts", "shared")

    def __init__(
        self, value: TensorOrTensors, skips: Mapping[Any, Tensor | None] | None = None
    ) -> None:
        check(value)
        #: Whether the value is a tensor alone.
        self.atomic = isinstance(value, Tensor)
        #: The tensors of the value, and of each skip.
        self.parts: dict[Any, Tensors] = {VALUE: (value,) if isinstance(value, Tensor) else value}
        for key, tensor in (skips or {}).items():
            self.parts[key] = () if tensor is None else (tensor,)
        # Most are. All else in this class holds for any, but takes its time.
        self._single = self.atomic and not skips
        #: The parts with a tensor that shares memory with another one.
        self.shared: frozenset[Any] = frozenset() if self._single else self._aliased()

    @property
    def value(self) -> TensorOrTensors:
        """The micro-batch as layers see it."""
        value = self.parts[VALUE]
        return value[0] if self.atomic else value

    @property
    def skips(self) -> dict[Any, Tensor | None]:
        """What passes by layers."""
        return {
            key: tensors[0] if tensors else None
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
        return any(tensor.requires_grad for tensor in self.tensors)

    def call(self, function: Callable[[Any], Any]) -> Batch:
        """The micro-batch that a layer makes of this one."""
        return Batch(function(self.value))

    def with_skips(self, skips: Mapping[Any, Tensor | None], shared: Iterable[Any] = ()) -> Batch:
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
        batch = copy(self)
        self.parts = {}
        return batch

    def replace(self, tensors: Iterable[Tensor]) -> Batch:
        """The same micro-batch with others instead of its :attr:`tensors`."""
        return self.map(lambda *_: tensors, self.parts)

    def map(self, function: Callable[..., Iterable[Tensor]], parts: Iterable[Any]) -> Batch:
        """The same micro-batch, some parts replaced by what a function of their tensors gives.

        What is one tensor in several places stays one.
        """
        chosen = {key: self.parts[key] for key in parts}
        found = _distinct(chosen.values())
        if not found:
            return self
        replaced = dict(zip(map(id, found), function(*found)))
        batch = copy(self)
        batch.parts = self.parts | {
            key: tuple([replaced[id(tensor)] for tensor in old]) for key, old in chosen.items()
        }
        return batch

    def aliases(self, other: Batch) -> bool:
        """Whether a tensor of this value shares memory with one of the other micro-batch."""
        return any(starmap(_is_alias_of, product(self.parts[VALUE], other.tensors)))

    def _aliased(self) -> frozenset[Any]:
        # One tensor in several places of the value stays one, but is another one as a skip.
        tensors = [(key, x) for key, part in self.parts.items() for x in _distinct([part])]
        return frozenset(
            key
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


def _is_alias_of(a: Tensor, b: Tensor) -> bool:
    # Also of sparse tensors, which have no storage to compare. Torch's stubs do not know it.
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def check(value: object) -> None:
    """Checks that a value can pass between partitions.

    Raises:
        TypeError: the value is neither a tensor nor a plain tuple of at least one tensor.
    """
    if isinstance(value, Tensor):
        return
    # Not a named tuple either: it would come out as a plain one.
    if type(value) is tuple and value and all(isinstance(x, Tensor) for x in value):
        return
    kind = type(value).__name__
    if isinstance(value, tuple):
        kind += f" of ({', '.join(type(x).__name__ for x in value)})"
    raise TypeError(
        "the input and the output of a partition must be a tensor, or a plain tuple of tensors "
        f"(value: {kind}); pack the tensors into a tuple, or move the split so that both layers "
        "are in one partition"
    )


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Splits a mini-batch into micro-batches along dimension 0.

    Args:
        input: a tensor, or a tuple of tensors, of shapes ``(rows, ...)`` with the same ``rows``.
        chunks: how many micro-batches to make, at least 1.

    Returns:
        ``min(rows, chunks)`` micro-batches, but one of an empty mini-batch. Their sizes differ by
        at most one row, the larger ones first.

    Raises:
        TypeError: the input is neither a tensor nor a plain tuple of tensors.
        ValueError: a tensor has no dimension to split, or their numbers of rows differ.
    """
    batch = Batch(input)
    sizes = [tuple(tensor.shape) for tensor in batch]
    if not all(sizes):
        raise ValueError(
            "every input tensor must have a batch dimension, since dimension 0 is split into "
            f"micro-batches (shapes: {sizes}); give it one with unsqueeze(0)"
        )
    if len({size[0] for size in sizes}) > 1:
        raise ValueError(
            "all input tensors must have the same size in dimension 0, since each micro-batch "
            f"takes the same rows of all (shapes: {sizes}); expand the smaller ones"
        )

    rows = sizes[0][0]
    m = max(1, min(rows, chunks))
    size, larger = divmod(rows, m)
    batches = []
    start = 0
    for i in range(m):
        length = size + (i < larger)
        # narrow() and not split(), whose views may not be changed in place.
        batches.append(batch.replace([x.narrow(0, start, length) for x in batch]))
        start += length
    return batches


def gather(outputs: Sequence[Batch]) -> TensorOrTensors:
    """Joins the outputs of all micro-batches along dimension 0: the inverse of :func:`scatter`.

    Raises:
        ValueError: the micro-batches differ in their number of tensors, or a tensor has no
            dimension 0 to join along.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first.value
    values = [batch.parts[VALUE] for batch in outputs]
    if len({(batch.atomic, len(value)) for batch, value in zip(outputs, values)}) > 1:
        raise ValueError(
            "the outputs of all micro-batches must have the same number of tensors "
            f"(numbers of tensors: {[len(value) for value in values]}); "
            "make the last layer return the same structure whatever the batch size"
        )
    if any(tensor.dim() == 0 for tensor in chain.from_iterable(values)):
        raise ValueError(
            "every output tensor must have a batch dimension, since the micro-batches are joined "
            f"along dimension 0 (shapes: {[tuple(tensor.shape) for tensor in values[0]]}); give "
            "it one with unsqueeze(0), or compute a loss outside of the wrapped model"
        )
    joined = tuple([torch.cat(tensors) for tensors in zip(*values)])
    return joined[0] if first.atomic else joined
