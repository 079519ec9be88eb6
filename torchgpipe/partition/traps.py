"""Likely traps: what is allowed, and seldom what a user means. Each is a warning, once per wrapper.

A warning may be wrong, since nobody sees from outside what a layer does with its input. So each
message also says how to silence it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.values import trees
from torchgpipe.values.division import row_count
from torchgpipe.values.marks import is_of_input
from torchgpipe.values.structure import Arguments

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
    """The warnings that one wrapper has given. A copy of the wrapper does not give them again.

    Args:
        wrapper: the name of its class.
    """

    def __init__(self, wrapper: str) -> None:
        self._wrapper = wrapper
        self._known: set[str] = set()

    def sequence_first(self, layers: Iterable[nn.Module], chunks: int) -> None:
        """Warn if layers take dimension 0 for the sequence while it is split."""
        if chunks == 1 or "sequence" in self._known:
            return
        found = list(chain.from_iterable(map(_sequence_first, layers)))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            warn(
                f"{self._wrapper} splits dimension 0 into micro-batches, and layers made without "
                f"batch_first=True take it for the sequence (layers: {', '.join(found[:3])}{more}, "
                f"chunks: {chunks}); make them with batch_first=True, and put the batch first in "
                "the input. Where a layer transposes its input itself, all is well: silence this "
                f"by warnings.filterwarnings('ignore', '{self._wrapper} splits dimension 0')"
            )
            self._known.add("sequence")

    def lists(self, input: Any, micro_batches: int) -> None:
        """Warn of lists and arrays with an entry for each row, of which some are split."""
        if micro_batches == 1 or "lists" in self._known:
            return
        found, rows = dict(lists(input, "", of_tensors=True)), row_count(input)
        named = ", ".join(path for path, length in found.items() if length == rows)
        if rows and named:
            warn(
                f"{self._wrapper} splits tensors, and lists with a tensor for each row. It gives "
                "other lists and arrays whole to every micro-batch "
                f"(input: {named}, entries: {rows}, micro-batches: {micro_batches}); pass a tensor "
                "to have it split, such as the indices of the entries, a tuple to have the tensors "
                "in it split, what every micro-batch shall get whole as torchgpipe.NoChunk(value), "
                "and what is divided already as torchgpipe.Chunks(values). If the entries are no "
                "rows, silence this by warnings.filterwarnings('ignore', "
                f"'{self._wrapper} splits tensors, and lists')"
            )
            self._known.add("lists")

    def no_pipelining(self, devices: int, chunks: int) -> None:
        """Warn if a model on several devices trains with one micro-batch."""
        if devices > 1 and chunks == 1 and "chunks" not in self._known:
            warn(
                f"{self._wrapper} trains without pipelining, one device after another, since each "
                f"mini-batch is one micro-batch (chunks: 1, devices: {devices}); set "
                f"model.chunks, for a start to {4 * devices}, or silence this by "
                f"warnings.filterwarnings('ignore', '{self._wrapper} trains without pipelining')"
            )
            self._known.add("chunks")

    def coupled(
        self,
        outputs: Sequence[torch.Size],
        rows: Sequence[int],
        inputs: Sequence[torch.Size],
        parameters: Iterable[Tensor],
    ) -> None:
        """Warn if an output compares the rows of its micro-batch with each other.

        Args:
            outputs: the shapes in the output of the first micro-batch.
            rows: the number of rows of each micro-batch; none if there is one.
            inputs: the shapes in its input. A size in them may be no number of rows.
            parameters: those of the layers, likewise.
        """
        if len(rows) < 2 or rows[0] < 2 or "coupled" in self._known:
            return
        if (rows[0], rows[0]) not in outputs:
            return
        if any(rows[0] in x[1:] for x in inputs) or any(rows[0] in x.shape for x in parameters):
            return
        warn(
            "an output has an entry for each pair of rows, so each row is compared with those of "
            f"its micro-batch alone (output: {(rows[0], rows[0])}, rows of the mini-batch: "
            f"{sum(rows)}); return what is compared, and compare it behind the wrapper, where all "
            "rows are. If that is what you mean, silence this by warnings.filterwarnings('ignore', "
            "'an output has an entry for each pair')"
        )
        self._known.add("coupled")


def _sequence_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """The outermost layers for which dimension 0 is the sequence."""
    if isinstance(module, SEQUENCES):
        if any(getattr(x, "batch_first", True) is False for x in module.modules()):
            yield f"{path or 'the model'} ({type(module).__name__})"
        return
    for name, child in module.named_children():
        yield from _sequence_first(child, f"{path}.{name}" if path else name)


def lists(value: Any, path: str, of_tensors: bool = False) -> Iterator[tuple[str, int]]:
    """The lists and arrays in a value that may have an entry for each row: path and length.

    Args:
        value: the value.
        path: how it is called.
        of_tensors: whether to include lists of tensors, each of which has as many rows as the list
            has entries, so that either may be meant.
    """
    if isinstance(value, Arguments):
        # The arguments of a call are no list, however many they are.
        entries = [(f"args[{k}]", x) for k, x in enumerate(value.args)]
        entries.append(("kwargs", value.kwargs))
    elif isinstance(value, Mapping):
        entries = [(f"{path}[{key!r}]", x) for key, x in value.items()]
    elif isinstance(value, list | tuple) and _is_container(value):
        if of_tensors and type(value) is list and all(_has_rows(x, len(value)) for x in value):
            yield path, len(value)
        entries = [(f"{path}[{k}]", x) for k, x in enumerate(value)]
    else:
        entries = []
        length = _length(value) if _is_list(value) else None
        if length is not None:
            yield path, length
    for name, entry in entries:
        yield from lists(entry, name, of_tensors)


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def _is_container(value: Any) -> bool:
    """Whether there are tensors, or marked values, in a list or tuple."""
    return any(isinstance(x, Tensor) or is_of_input(x) for x in trees.leaves_of(value))


def _is_list(value: Any) -> bool:
    """Whether the entries of a value may be rows, as those of a text, set or shape are not."""
    if isinstance(value, tuple | list):
        # Named tuples have fields, and a few integers are a shape.
        is_shape = len(value) < 4 and all(isinstance(x, int) for x in value)
        return type(value) in (tuple, list) and not is_shape and any(x is not None for x in value)
    return not (
        is_of_input(value) or isinstance(value, Tensor | nn.Module | str | bytes | set | frozenset)
    )


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:
        # Most objects have no length, and arrays without a dimension have one that raises.
        return None
