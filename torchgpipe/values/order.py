"""The order of rows: whether outputs with several rows for each row can be joined.

A layer may return several rows for each row of its input, in one of two orders, here for the rows
``a`` and ``b``::

    row by row       a0 a1 b0 b1      as of repeat_interleave, or of the k best of each row
    block by block   a0 b0 a1 b1      as of torch.cat([crop, other crop])

Micro-batches that are joined have the order of the mini-batch only if it is row by row. Shapes do
not tell, nor do values. So where a function returns more rows than it was given for the first
micro-batch, PyTorch's functions that put blocks one behind another are looked for while it computes
the second one, and what becomes of their results. Other models are not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.values.structure import Tensors, is_dense

__all__: list[str] = []

NOTHING: AbstractContextManager[None] = nullcontext()

#: Functions that put what they are given one behind another.
JOINING = {"cat", "concat", "concatenate", "vstack", "row_stack", "repeat", "tile"}
#: Functions that make dimension 0 of several dimensions.
RESHAPING = {"flatten", "reshape", "reshape_as", "view", "view_as"}
#: Functions that may make another dimension the first one.
TURNING = {"t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}


class Order:
    """The order of rows that layers return, in one step.

    Args:
        layers: the layers.
        before: the order of what comes to them; None if that is the caller's mini-batch.

    Attributes:
        blocks: the places of tensors whose rows are block by block, among those that the layers
            have returned for the second micro-batch.
        known: whether the second micro-batch was computed.
    """

    def __init__(self, layers: nn.Module, before: Order | None = None) -> None:
        self._layers, self._before = layers, before
        #: The rows of the first micro-batch; None before it.
        self._rows: int | None = None
        #: Whether the layers have returned more rows than they were given.
        self._grows = False
        self._watch: Watch | None = None
        self.blocks: frozenset[int] = frozenset()
        self.known = False

    def begin(self, given: Tensors) -> AbstractContextManager[Any]:
        """Context manager for a call of the layers: with the first micro-batch, then the second.

        Args:
            given: the tensors that the layers are called with.
        """
        if self._rows is None:
            return NOTHING
        entering = self._before.blocks if self._before is not None else ()
        # Compiled code would be compiled anew for the mode.
        if (self._grows or entering) and not any(map(is_compiled, self._layers.modules())):
            self._watch = Watch(rows_of(given), [given[k] for k in entering])
            return self._watch
        return NOTHING

    def end(self, given: Tensors, returned: Tensors) -> None:
        """Look at what the call has returned.

        Args:
            given: the tensors that the layers were called with, or others with as many rows.
            returned: the tensors that they have returned.
        """
        if self._rows is None:
            self._rows = rows = rows_of(given)
            self._grows = any(rows_of([x]) > rows > 0 for x in returned)
            return
        self.known = True
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.over = True
            self.blocks = frozenset([k for k, x in enumerate(returned) if x in watch.found])


class Watch(TorchFunctionMode):
    """Find tensors whose rows are block by block, within a ``with`` block.

    Args:
        rows: the number of rows of a micro-batch.
        found: the tensors that are known to be.

    Attributes:
        over: whether to look no more. Whoever has taken the modes of the block along enters them
            later.
    """

    def __init__(self, rows: int, found: Iterable[Tensor]) -> None:
        super().__init__()
        self._rows = rows
        self.found: WeakIdKeyDictionary = WeakIdKeyDictionary(dict.fromkeys(found, True))
        self.over = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not self.over and not name.startswith("__"):
            if name == "stack" and kwargs.get("dim", [*args, 0][1]) != 0:
                name = ""
            sources = [*_tensors([*args, *kwargs.values()])]
            for x in _tensors([result]):
                if any(self._is_in_blocks(name, source, x) for source in sources):
                    self.found[x] = True
        return result

    def _is_in_blocks(self, name: str, source: Tensor, result: Tensor) -> bool:
        """Whether the rows of a result are block by block, as far as one of its sources tells."""
        size, before, rows = result.shape[0], source.shape[0], self._rows
        if name in JOINING:
            return (before % rows == 0 and size > before) or source in self.found
        if name == "stack":
            # Rows are in dimension 1 now.
            return before % rows == 0
        if name in RESHAPING and size in _products(source.shape):
            # So they are where the sequence is first.
            second = source.dim() > 1 and source.shape[1] % rows == 0 and before % rows != 0
            return second or source in self.found
        if source not in self.found or size != before:
            return False
        return name not in TURNING or result.stride(0) == source.stride(0)


def _products(shape: Iterable[int]) -> list[int]:
    """The sizes that several first dimensions may become one of."""
    sizes = [*shape]
    return [prod(sizes[:k]) for k in range(2, len(sizes) + 1)]


def rows_of(tensors: Iterable[Tensor]) -> int:
    """The first size of the first of some tensors that has one; 0 without any."""
    return next((x.shape[0] for x in tensors if is_dense(x) and x.dim()), 0)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor) and is_dense(x) and x.dim():
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def verify_rows(
    name: Callable[[], str], tensors: Tensors, rows: Sequence[int], in_blocks: bool
) -> None:
    """Check that the outputs of all micro-batches can be joined along dimension 0.

    Args:
        name: returns the name of the output.
        tensors: the output of each micro-batch.
        rows: the number of rows of each micro-batch.
        in_blocks: whether several rows for each row are block by block.

    Raises:
        ValueError: their first sizes are not one multiple of the rows, or the rows are in blocks.
    """
    # One element alone is one for each micro-batch, as a loss is: 0.0.7 joined no other losses.
    if all(x.numel() == 1 for x in tensors) or not all(x.dim() for x in tensors):
        return
    multiple = tensors[0].shape[0] // rows[0]
    shapes = [tuple(x.shape) for x in tensors]
    if any(x.shape[0] != multiple * size for x, size in zip(tensors, rows)):
        raise ValueError(
            "the first size of an output must be the same multiple of the rows of each "
            "micro-batch, since all micro-batches are joined along dimension 0 "
            f"(output: {name()}, shapes: {shapes}, rows: {list(rows)}); "
            "have the last layer return it with the rows in dimension 0, as transpose(0, 1) puts "
            "them for an RNN's state, or padded to so many rows, or as "
            "torchgpipe.PerMicroBatch(output) for one of each micro-batch, stacked"
        )
    if in_blocks and multiple > 1:
        raise ValueError(
            "an output with several rows for each row must have them side by side, since all "
            "micro-batches are joined along dimension 0, and torch.cat(views) puts all rows of "
            f"one view in front of those of the next (output: {name()}, shapes: {shapes}, rows: "
            f"{list(rows)}); have the model return a tensor for each view, as "
            f"output.chunk({multiple}), or all of them with the rows in dimension 0, as "
            f"torch.stack(output.chunk({multiple}), 1)"
        )
