"""Likely traps: what is allowed, and seldom what a user means. Each is a warning, once per wrapper.

A warning may be wrong, since nobody sees from outside what a layer does with its input. So each
message also says how to silence it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.values import trees
from torchgpipe.values.structure import Arguments, NoChunk, is_split, names

__all__: list[str] = []

#: PyTorch's layers that take dimension 0 for the sequence, unless told batch_first=True.
SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


class Traps:
    """The warnings that one wrapper has given. A copy of the wrapper does not give them again."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def sequence_first(self, partitions: Iterable[nn.Module], chunks: int) -> None:
        """Warn if layers take dimension 0 for the sequence while it is split."""
        if chunks == 1 or "sequence" in self._known:
            return
        found = list(chain.from_iterable(map(_sequence_first, partitions)))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            warn(
                "GPipe splits dimension 0 into micro-batches, and layers made without "
                f"batch_first=True take it for the sequence (layers: {', '.join(found[:3])}{more}, "
                f"chunks: {chunks}); make them with batch_first=True, and put the batch first in "
                "the input. Where a layer transposes its input itself, all is well: silence this "
                "by warnings.filterwarnings('ignore', 'GPipe splits dimension 0')"
            )
            self._known.add("sequence")

    def whole(self, input: Any, micro_batches: int) -> None:
        """Warn if lists or arrays in an input have an entry for each row, and are not split."""
        if micro_batches == 1 or "whole" in self._known:
            return
        lengths = dict(lists(input, ""))
        if not lengths:
            return
        rows = next(leaf.shape[0] for _, leaf in names(input) if is_split(leaf))
        found = [path for path, length in lengths.items() if length == rows]
        if found:
            warn(
                "GPipe splits tensors alone, and gives lists and arrays whole to every micro-batch "
                f"(input: {', '.join(found)}, entries: {rows}, micro-batches: {micro_batches}); "
                "pass a tensor to have it split, such as the indices of the entries, and what "
                "every micro-batch shall get whole as torchgpipe.NoChunk(value)"
            )
            self._known.add("whole")

    def no_pipelining(self, partitions: int, chunks: int) -> None:
        """Warn if several partitions train with one micro-batch."""
        if partitions > 1 and chunks == 1 and "chunks" not in self._known:
            warn(
                "GPipe trains without pipelining, one partition after another, since each "
                f"mini-batch is one micro-batch (chunks: 1, partitions: {partitions}); set "
                f"model.chunks, for a start to {4 * partitions}, or silence this by "
                "warnings.filterwarnings('ignore', 'GPipe trains without pipelining')"
            )
            self._known.add("chunks")


def _sequence_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """The outermost layers for which dimension 0 is the sequence."""
    for name, child in module.named_children():
        if not isinstance(child, SEQUENCES):
            yield from _sequence_first(child, f"{path}{name}.")
        elif any(getattr(x, "batch_first", True) is False for x in child.modules()):
            yield f"{path}{name} ({type(child).__name__})"


def lists(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """The lists and arrays without tensors in a value: the path and the length of each."""
    if isinstance(value, Arguments):
        # The arguments of a call are no list, however many they are.
        entries = [(f"args[{k}]", x) for k, x in enumerate(value.args)]
        entries.append(("kwargs", value.kwargs))
    elif isinstance(value, Mapping):
        entries = [(f"{path}[{key!r}]", x) for key, x in value.items()]
    elif isinstance(value, list | tuple) and _is_container(value):
        entries = [(f"{path}[{k}]", x) for k, x in enumerate(value)]
    else:
        entries = []
        length = _length(value) if _is_list(value) else None
        if length is not None:
            yield path, length
    for name, entry in entries:
        yield from lists(entry, name)


def _is_container(value: Any) -> bool:
    """Whether there are tensors, or marked values, in a list or tuple."""
    return any(isinstance(x, Tensor | NoChunk) for x in trees.leaves_of(value))


def _is_list(value: Any) -> bool:
    """Whether the entries of a value may be rows, as those of a text, set or shape are not."""
    if isinstance(value, tuple | list):
        # Named tuples have fields, and a few integers are a shape.
        is_shape = len(value) < 4 and all(isinstance(x, int) for x in value)
        return type(value) in (tuple, list) and not is_shape and any(x is not None for x in value)
    return not isinstance(value, Tensor | NoChunk | nn.Module | str | bytes | set | frozenset)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:
        # Most objects have no length, and arrays without a dimension have one that raises.
        return None
