"""The order of rows: whether outputs with several rows per input row can be concatenated.

A layer may return several rows for each row of its input, in one of two orders, here for the rows
``a`` and ``b``::

    row by row       a0 a1 b0 b1      as of repeat_interleave, or of the k best of each row
    block by block   a0 b0 a1 b1      as of torch.cat([crop, other crop])

The concatenated outputs of micro-batches are the output for the mini-batch only if rows are in the
order row by row. Neither shapes nor values show the order. So if layers return more rows than they
got for the first micro-batch, a torch-function mode watches them compute the second one. It looks
for functions such as ``torch.cat``, and follows their results. Other models are not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.values.structure import Tensors, is_dense

__all__: list[str] = []

#: What ``BlockWatch`` knows of a tensor. ``DEPENDS``: it depends on the micro-batch, in no known
#: order. ``HAS_ROWS``: dimension 0 has the micro-batch's rows, row by row. ``IN_BLOCKS``: dimension
#: 0 has several rows for each row of the micro-batch, block by block.
DEPENDS, HAS_ROWS, IN_BLOCKS = 1, 2, 3

#: Functions that concatenate arguments, or copies of one: rows of the result are block by block.
JOINING = {"cat", "concat", "concatenate", "vstack", "row_stack", "repeat", "tile"}
#: Functions that may merge several dimensions into dimension 0.
RESHAPING = {"flatten", "reshape", "reshape_as", "view", "view_as"}
#: Functions that return views, whose dimension 0 may be another dimension of the tensor. Properties
#: such as ``x.T`` have the name ``__get__``.
TURNING = {"t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}
TURNING |= {"unbind", "select", "narrow", "__get__"}
#: Functions that split a tensor. If its rows are block by block, and a result has as many rows as
#: the micro-batch, this result is one block, and so row by row.
SPLITTING = {"chunk", "split", "tensor_split", "split_with_sizes"}
#: Functions that may put rows into another order.
REORDERING = {"index_select", "gather", "take", "take_along_dim", "sort", "argsort", "flip", "roll"}
REORDERING |= {"scatter", "scatter_add", "index_add", "index_copy", "index_put", "masked_select"}


class Order:
    """The order of rows that layers return, in one step.

    Args:
        layers: the layers.
        before: the order of the layers before them; None if these are the first ones.

    Attributes:
        blocks: the indices of the output tensors whose rows are block by block, as seen in the
            second micro-batch.
        known: whether the result is final, so that no further micro-batch is watched.
    """

    def __init__(self, layers: nn.Module, before: Order | None = None) -> None:
        self._layers, self._before = layers, before
        #: Whether the layers have returned more rows than they were given, for the first
        #: micro-batch; None before they have computed it.
        self._grows: bool | None = None
        self._watch: BlockWatch | None = None
        self.blocks: frozenset[int] = frozenset()
        self.known = False

    def begin(self, inputs: Tensors) -> AbstractContextManager[Any]:
        """Context manager for a call of the layers with the tensors that they are given.

        It watches the second micro-batch if needed.
        """
        entering = self._before.blocks if self._before is not None else ()
        rows, grows = rows_of(inputs), self._grows or (self._grows is False and entering)
        # Compiled layers are not watched: PyTorch compiles again under a torch-function mode.
        if self.known or not (rows and grows) or any(map(is_compiled, self._layers.modules())):
            return nullcontext()
        self._watch = BlockWatch(rows, inputs, entering)
        return self._watch

    def end(self, inputs: Tensors, returned: Tensors) -> None:
        """Look at what the call has returned.

        Args:
            inputs: the tensors that the layers were called with, or others with as many rows.
            returned: the tensors that they have returned.
        """
        before = self._before
        if self._grows is None:
            rows = rows_of(inputs)
            self._grows = any(rows_of([x]) > rows > 0 for x in returned)
            # Layers that return as many rows as they got need no watch, unless rows came in blocks.
            joined = before is None or (before.known and not before.blocks)
            self.known = joined and not self._grows
            return
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.over = True
            self.blocks = frozenset([k for k, x in enumerate(returned) if watch.is_in_blocks(x)])
        # ``known`` is set after ``blocks``: the next partition may read both in another thread.
        self.known = True


class BlockWatch(TorchFunctionMode):
    """Find tensors whose rows are block by block, within a ``with`` block.

    Args:
        rows: the number of rows of a micro-batch.
        given: the tensors that depend on the micro-batch.
        entering: the indices of those among them whose rows are block by block.

    Attributes:
        over: whether to stop watching. A recomputation may enter the modes of the block later.
    """

    def __init__(self, rows: int, inputs: Sequence[Tensor], entering: Container[int]) -> None:
        super().__init__()
        self._rows = rows
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for k, x in enumerate(inputs):
            has_rows = is_dense(x) and x.dim() > 0 and x.shape[0] == rows
            known = HAS_ROWS if has_rows else DEPENDS
            self._known[x] = IN_BLOCKS if k in entering else known
        self.over = False

    def is_in_blocks(self, tensor: Tensor) -> bool:
        """Whether the rows of a tensor are block by block."""
        return bool(self._known.get(tensor) == IN_BLOCKS)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.over:
            self._look(_name(func, args, kwargs), [*args, *kwargs.values()], result)
        return result

    def _look(self, name: str, args: Sequence[Any], result: Any) -> None:
        sources = [x for x in _tensors(args) if x in self._known]
        if not sources:
            return
        several = name in ("repeat", "tile") or len(sources) > 1
        for x in _tensors([result]):
            self._known[x] = max([self._kind(name, source, x, several) for source in sources])

    def _kind(self, name: str, source: Tensor, result: Tensor, several: bool) -> int:
        """Derive the knowledge of a function's result from one of its arguments, the source.

        ``several`` says whether the function concatenates several tensors, or copies of one.
        """
        kind: int = self._known[source]
        rows = self._rows
        size, before = result.shape[0], source.shape[0]
        if name in JOINING and size > before:
            return IN_BLOCKS if kind == IN_BLOCKS or (kind == HAS_ROWS and several) else DEPENDS
        if name == "stack":
            # Dimension 0 counts stacked tensors now: each of them is a block, with rows in it.
            return IN_BLOCKS if kind == HAS_ROWS and several else DEPENDS
        if name in RESHAPING and size > before > 0 and size % before == 0:
            # Rows in dimension 1, as with batch_first=False, come into dimension 0 block by block.
            second = source.dim() > 1 and source.shape[1] % rows == 0 and before % rows != 0
            return IN_BLOCKS if second else kind
        if name == "repeat_interleave" and size > before:
            return kind
        if name in SPLITTING and kind == IN_BLOCKS and size == rows:
            return HAS_ROWS
        if size != before or (kind == IN_BLOCKS and name in REORDERING):
            return DEPENDS
        if name in TURNING and result.stride(0) != source.stride(0):
            return DEPENDS
        return kind


def _name(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The name of a function, or another name if its arguments decide what it does to rows."""
    name = getattr(func, "__name__", "")
    if name == "stack" and kwargs.get("dim", [*args, 0][1]) != 0:
        return ""
    if name == "__getitem__":
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        # A slice of all rows keeps them in order, so it is named like select(). Other indices may
        # choose or reorder rows, so they are named like index_select().
        whole = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
        return "select" if whole else "index_select"
    return name


def rows_of(tensors: Iterable[Tensor]) -> int:
    """The size of dimension 0 of the first tensor that has rows; 0 if none has."""
    return next((rows for x in _tensors(tensors) if (rows := x.shape[0])), 0)


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
        ValueError: their sizes in dimension 0 are not the same multiple of the rows, or rows are in
            blocks.
    """
    # Outputs of one element, such as losses, need no check: each micro-batch has one.
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
