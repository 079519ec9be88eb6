"""Likely mistakes: calls that are allowed, but seldom meant. Each is a warning, once per wrapper.

A warning may be wrong, since it is not known what a layer does with its input. So each message also
says how to silence it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.values import trees
from torchgpipe.values.division import is_list_of_tensors, leaves_in, row_count
from torchgpipe.values.marks import is_of_input
from torchgpipe.values.structure import Arguments, names

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
        """Warn of lists and arrays with an entry for each row: most are not split."""
        if micro_batches == 1:
            return
        rows = row_count(input)
        found = [path for path, length in lists(input, "") if length == rows > 0]
        if found and "lists" not in self._known:
            warn(
                f"{self._wrapper} splits tensors, and gives lists and arrays whole to every "
                f"micro-batch (input: {', '.join(found)}, entries: {rows}, micro-batches: "
                f"{micro_batches}); pass a tensor to have it split, such as the indices of the "
                "entries, what is divided already as torchgpipe.Chunks(values), and what every "
                "micro-batch shall get whole as torchgpipe.NoChunk(value)"
                f"{self._silenced('splits tensors, and gives lists')}"
            )
            self._known.add("lists")
        # With other numbers of rows the tensors in such a list would be split.
        either = [
            name
            for name, leaf in names(input, leaves_in(input))
            if is_list_of_tensors(leaf) and all(len(x) == rows for x in leaf)
        ]
        if either and "either" not in self._known:
            warn(
                f"{self._wrapper} splits a list with a tensor for each row as a list, and not the "
                f"tensors in it (input: {', '.join(either)}, entries: {rows}, rows: {rows}); pass "
                "a tuple to have the tensors in it split"
                f"{self._silenced('splits a list')}"
            )
            self._known.add("either")

    def _silenced(self, words: str) -> str:
        """The end of a message, which says how to silence it."""
        return (
            ". If all is as you mean it, silence this by warnings.filterwarnings('ignore', "
            f"'{self._wrapper} {words}')"
        )

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
        outputs: Sequence[Sequence[torch.Size]],
        rows: Sequence[int],
        inputs: Sequence[torch.Size],
        parameters: Iterable[Tensor],
    ) -> None:
        """Warn if an output compares the rows of its micro-batch with each other.

        Args:
            outputs: the shapes in the outputs of the first micro-batch and, if they are known, of
                the last.
            rows: the number of rows of each micro-batch; none if there is one.
            inputs: the shapes of the input. If one has a size equal to the rows, the output's size
                may come from there.
            parameters: those of the layers, whose sizes may explain the output's size, too.
        """
        if len(rows) < 2 or rows[0] < 2 or "coupled" in self._known or not outputs:
            return
        if (rows[0], rows[0]) not in outputs[0]:
            return
        if rows[-1] != rows[0] and len(outputs) > 1:
            # Another number of rows tells whether the size follows it.
            if (rows[-1], rows[-1]) not in outputs[-1]:
                return
        elif any(rows[0] in x[1:] for x in inputs) or any(rows[0] in x.shape for x in parameters):
            return
        warn(
            "an output has an entry for each pair of rows, so each row is compared with those of "
            f"its micro-batch alone (output: {(rows[0], rows[0])}, rows of the mini-batch: "
            f"{sum(rows)}); return what is compared, and compare it after the wrapper, where all "
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
    return any(isinstance(x, Tensor) or is_of_input(x) for x in trees.leaves_of(value))


def _is_list(value: Any) -> bool:
    """Whether the entries of a value may be rows: no text, set or shape has such entries."""
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
