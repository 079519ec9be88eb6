"""The marks by which a caller or a layer says what the rows of a value are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.checks import has_entries
from torchgpipe.values.structure import InputMark, is_dense, is_of_input, leaves_of, map_leaves

__all__ = ["Chunk", "Chunks", "NoChunk", "PerMicroBatch"]


class NoChunk(InputMark):
    """Mark a value that every micro-batch gets whole: ``model(input, NoChunk(mask))``.

    The mark may be anywhere in the input of a wrapped model. Layers see the value itself.

    Args:
        value: a tensor, or a nested structure of tensors. Layers must not change it in place.
    """

    __slots__ = ()


class Chunk(InputMark):
    """Mark a tensor whose rows are another dimension: ``model(ids, Chunk(positions, dim=1))``.

    The mark may be anywhere in the input of a wrapped model, or among the targets of a loss. Layers
    see the tensor itself, with their micro-batch's rows in the same dimension.

    Args:
        value: a tensor.
        dim: the dimension of its rows; a negative one counts from the last.

    Raises:
        TypeError: the value is no tensor, or the dimension no integer.
        ValueError: the tensor has no such dimension, or is sparse or nested.
    """

    __slots__ = ("dim",)

    def __init__(self, value: Tensor, dim: int) -> None:
        if not isinstance(value, Tensor) or isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(
                "Chunk marks a tensor and the dimension of its rows (value: "
                f"{type(value).__name__}, dim: {dim!r}); mark each tensor of a container, as "
                "Chunk(tensor, dim=1)"
            )
        if not is_dense(value):
            raise ValueError(
                "Chunk marks a dense tensor, which has rows and views (layout: "
                f"{'nested' if value.is_nested else value.layout}); pass a dense one, or divide it "
                "yourself, as Chunks([first, second])"
            )
        if not -value.dim() <= dim < value.dim():
            raise ValueError(
                f"the dimension of rows must be one of the tensor's (dim: {dim}, shape: "
                f"{tuple(value.shape)}); count from 0, or from -1 backwards"
            )
        super().__init__(value)
        self.dim = dim % value.dim()

    def __repr__(self) -> str:
        return f"Chunk({self.value!r}, dim={self.dim})"


class Chunks(InputMark):
    """Mark a value that its caller has divided: ``model(Chunks([first, second, third]))``.

    Entry ``i`` goes to micro-batch ``i``. It may be anything: tensors of any shapes, plain objects,
    None. All marks of a call have the same length. It is the number of micro-batches of that step,
    whatever ``chunks`` is, and values without the mark are split into as many. If all tensors of a
    call are marked so, the model returns a list with the output of each micro-batch.

    Args:
        values: an entry for each micro-batch.

    Raises:
        TypeError: the values are no sequence, or contain marks.
        ValueError: there is no entry.
    """

    __slots__ = ()

    def __init__(self, values: Iterable[Any]) -> None:
        refused = (Tensor, Mapping, str, bytes, set, frozenset)
        if isinstance(values, refused) or not has_entries(values):
            raise TypeError(
                "Chunks marks a list with an entry for each micro-batch (values: "
                f"{type(values).__name__}); pass such as Chunks(tensor.split(4)), or "
                "Chunks.of(batches) for a list of dictionaries"
            )
        super().__init__([*values])
        if not self.value:
            raise ValueError(
                "Chunks must have an entry for each micro-batch (entries: 0); skip the step where "
                "there is none"
            )
        marks = [type(x).__name__ for x in leaves_of(self.value, is_mark) if is_mark(x)]
        if marks:
            raise TypeError(
                "marks must not be within Chunks, whose entries go to one micro-batch each "
                f"(marks: {marks}); pass the values themselves"
            )

    @classmethod
    def of(cls, batches: Iterable[Mapping[str, Any]]) -> dict[str, Chunks]:
        """Turn a list of keyword arguments, as a loader gives them, into arguments of one call.

        ::

            outputs = pipe(**Chunks.of(batches))  # as [model(**batch) for batch in batches]

        Args:
            batches: the keyword arguments of each micro-batch.

        Raises:
            TypeError: an entry is no mapping.
            ValueError: there is none, or they differ in their keys.
        """
        entries = [*batches]
        wrong = [type(x).__name__ for x in entries if not isinstance(x, Mapping)]
        if wrong:
            raise TypeError(
                "each micro-batch must be a mapping of keyword arguments (entries: "
                f"{wrong}); pass other values as Chunks(values)"
            )
        if not entries:
            raise ValueError(
                "there must be a micro-batch (batches: 0); skip the step where there is none"
            )
        if any(x.keys() != entries[0].keys() for x in entries):
            raise ValueError(
                "all micro-batches must have the same keys, since each becomes an argument of one "
                f"call (keys: {[sorted(x) for x in entries]}); pass None where one has no value"
            )
        return {key: cls([x[key] for x in entries]) for key in entries[0]}

    def __len__(self) -> int:
        return len(self.value)


class PerMicroBatch(NamedTuple):
    """Mark an output of which there is one for each micro-batch: ``return x, PerMicroBatch(h)``.

    The wrapped model stacks them along a new dimension 0, as it does with losses: a tensor of shape
    ``s`` comes out in shape ``(m, *s)``, without the mark. A layer that is not the last one may
    return the mark, too; layers between pass it on.

    Args:
        value: a tensor, or a nested structure of tensors, of one shape in all micro-batches.
    """

    # PyTorch takes every named tuple for a container, so the class need not be registered for that.
    value: Any


def tensors_in(leaf: Any) -> list[Tensor]:
    """The tensors of a leaf of an input: itself, or those that it marks, or that are in a list."""
    value = leaf.value if is_of_input(leaf) else leaf
    leaves = [value] if isinstance(value, Tensor) else leaves_of(value)
    return [x for x in leaves if isinstance(x, Tensor)]


def is_mark(value: Any) -> bool:
    """Whether a value is a mark of any kind."""
    return is_of_input(value) or is_marked(value)


def is_marked(value: Any) -> bool:
    """Whether a value is a :class:`PerMicroBatch` mark."""
    return isinstance(value, PerMicroBatch)


def unmarked(value: Any) -> Any:
    """A value without its :class:`PerMicroBatch` marks."""
    return map_leaves(lambda x: unmarked(x.value) if is_marked(x) else x, value, is_marked)
