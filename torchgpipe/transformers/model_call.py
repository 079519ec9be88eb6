"""The call of a model for a mini-batch: its micro-batches, and the loss of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.hugging_face import base_of
from torchgpipe.mapped.lazy_outputs import can_fill_itself, on_reading, there
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.transformers.children import recorded, repeated
from torchgpipe.transformers.collating import as_one_batch, in_one
from torchgpipe.transformers.counting import counts_by, shares_of, told, whole
from torchgpipe.transformers.proof import ONCE, compared, rows_in, run, weighing_of
from torchgpipe.values.division import Division, FlatInput, row_count
from torchgpipe.values.marks import Chunks
from torchgpipe.values.microbatch import Batch, joined
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []


class ModelCall:
    """A call of the model for one mini-batch.

    Args:
        args: the arguments of the model.
        kwargs: the same, with ``num_items_in_batch`` if the model shall know it.
        micro_batches: the keyword arguments of each, if the mini-batch cannot be cut by rows.
        names: the arguments that are labels.
        device: where outputs go to; None if they stay where they are.
        strict: whether to prove how rows are weighed, and another loss is an error; None without a
            proof.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batches: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        device: torch.device | None,
        strict: bool | None = None,
    ) -> None:
        self.args, self.kwargs = args, {**kwargs}
        self._strict = strict
        self._names, self._device = names, device
        self._items = self.kwargs.pop("num_items_in_batch", None)
        self._plain = self.kwargs
        self._micro_batches = [{**part} for part in micro_batches]
        self._is_one_row = bool(micro_batches) and row_count(kwargs) == 1

    def divide(self, pipe: MappedGPipe, chunks: int) -> None:
        """Divide the mini-batch, and tell what each micro-batch counts in its loss."""
        if self._micro_batches:
            sizes = [rows_in(part, self._names) for part in self._micro_batches]
            self.division = Division(sizes)
        else:
            self.kwargs = self._plain
            self.division = FlatInput((self.args, self.kwargs)).division(chunks)
            sizes = self.division.sizes
        model, weighing = pipe.module, weighing_of(pipe)
        if self._strict is not None and self.division.m > 1:
            # Parts of one packed row prove nothing: each may change the outputs of the others.
            first = [] if self._is_one_row else self._micro_batches[:2]
            pair = [as_one_batch(first, False), *first] if first else []
            if pair or not self._micro_batches:
                weighing.prove(
                    *(self.args, self._plain, pair, sum(sizes), self._names), strict=self._strict
                )
        way = weighing.way(self._plain)
        #: Which calls of the model's children :meth:`once` takes the outputs of, to compute one
        #: loss for all rows; None if the losses of micro-batches are combined instead.
        self.by_rows = weighing.by_rows if way == ONCE and not self._is_one_row else None
        wholes = [*zip(self._micro_batches, ([n] for n in sizes))] or [(self.kwargs, sizes)]
        counts = torch.cat([counts_by(way, model, x, self._names, n) for x, n in wholes])
        if next(pipe.parameters(), counts).dtype == torch.float64:
            counts = counts.double()
        items = None if self._items is None else told(counts, self._items)
        for part, count in zip(self._micro_batches, items or ()):
            part["num_items_in_batch"] = count
        if items is not None and not self._micro_batches:
            self.kwargs = {**self._plain, "num_items_in_batch": Chunks(items)}
        # A single micro-batch is the whole mini-batch, so its share is 1.
        self.shares = (
            torch.ones_like(counts)
            if way == "sum" or len(counts) == 1
            else shares_of(counts, nan_if_empty=self._items is None)
        )

    def sample(self, model: nn.Module, chunks: int) -> dict[str, Any]:
        """The arguments of the first micro-batch, by name, before the mini-batch is divided."""
        args, kwargs = self.args, self._micro_batches[0] if self._micro_batches else self.kwargs
        if not self._micro_batches:
            flat = FlatInput((args, kwargs))
            args, kwargs = next(flat.split(flat.division(chunks)))
        return {**dict(zip(signature(model.forward).parameters, args)), **kwargs}

    @property
    def is_given(self) -> bool:
        """Whether the micro-batches are made already."""
        return bool(self._micro_batches)

    def parts(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each micro-batch."""
        if self._micro_batches:
            return ((self.args, part) for part in self._micro_batches)
        return FlatInput((self.args, self.kwargs)).split(self.division)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all micro-batches; losses now, and others when one is read."""
        first = outputs[0]
        if not can_fill_itself(first):
            return self._joined(outputs)
        losses = {
            name: torch.stack([x[name] for x in outputs])
            for name, value in there(first).items()
            if isinstance(value, Tensor) and not value.dim()
        }
        return on_reading(first, losses, lambda: self._joined(outputs))

    def _joined(self, outputs: Sequence[Any]) -> Any:
        batches = [Batch(x) for x in outputs]
        if not self._micro_batches:
            return joined(batches, self.division)
        tensors = [in_one(column, self._is_one_row) for column in zip(*batches)]
        return batches[0].replace(tensors).value

    def once(self, pipe: MappedGPipe, output: Any) -> Any:
        """Compute the loss of all rows at once, of what the model's children have returned."""
        if self.by_rows is None:
            return output
        items = {} if self._items is None else {"num_items_in_batch": self._items}
        whole = Division([sum(self.division.sizes)])
        ((args, kwargs),) = FlatInput((self.args, {**self._plain, **items})).split(whole)
        return repeated(pipe, args, kwargs, output[1])

    def finished(self, output: Any) -> Any:
        """Combine the losses of all micro-batches into one, and move outputs to their device.

        An output that can fill itself moves all but losses when one is read.
        """
        m, rows = self.division.m, sum(self.division.sizes)

        def is_loss(name: str, value: Any) -> bool:
            """Whether it is the loss of all rows."""
            return self.by_rows is not None and isinstance(value, Tensor) and name.endswith("loss")

        def finished(name: str, value: Any) -> Any:
            if is_loss(name, value):
                return value.to(self._device)
            if is_stacked(name, value, m, rows):
                return whole(value, self.shares).to(self._device)
            return map_leaves(self._arrived, value)

        if can_fill_itself(output):
            values = there(output).items()
            losses = {
                key: finished(key, x)
                for key, x in values
                if is_loss(key, x) or is_stacked(key, x, m, rows)
            }
            return on_reading(output, losses, lambda: map_leaves(self._arrived, {**output}))
        if isinstance(output, tuple):
            return tuple([finished("" if k else "loss", x) for k, x in enumerate(output)])
        if not isinstance(output, dict):
            return finished("", output)
        for name in [*output]:
            output[name] = finished(name, output[name])
        return output

    def _arrived(self, x: Any) -> Any:
        return x.to(self._device) if isinstance(x, Tensor) else x


def compute(pipe: MappedGPipe, calls: Sequence[ModelCall]) -> list[Any]:
    """Compute calls of the model for several mini-batches in one call of the wrapper.

    Returns:
        The output of each mini-batch.
    """
    # Trainers set train or eval mode on the model, and not on the wrapper.
    pipe.training = pipe.module.training
    if len({len(x.args) for x in calls}) > 1:
        # Calls with unequally many positional arguments cannot be joined: each is computed alone.
        return [compute(pipe, [x])[0] for x in calls]
    chunks = -(-pipe.chunks // len(calls))
    for call in calls:
        call.divide(pipe, chunks)
    by_rows = calls[0].by_rows
    if any(x.by_rows is not by_rows for x in calls):
        return [compute(pipe, [x])[0] for x in calls]
    with nullcontext() if by_rows is None else recorded(pipe.module, by_rows):
        if len(calls) == 1 and not calls[0].is_given:
            results = [pipe(*calls[0].args, **calls[0].kwargs)]
        else:
            parts = [*chain(*[call.parts() for call in calls])]
            outputs = iter(run(pipe, pipe.module, parts))
            results = [call.joined([*islice(outputs, call.division.m)]) for call in calls]
    return [call.finished(call.once(pipe, x)) for call, x in zip(calls, results)]


def loss_of(
    pipe: MappedGPipe, output: Any, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> Tensor:
    """The loss of a mini-batch, of the losses that a model returns for its micro-batches.

    ::

        loss = loss_of(pipe, pipe(**batch), batch)
        loss = loss_of(pipe, pipe(**Chunks.of(batches)), batches)

    A mean over micro-batches is another loss if they have unequally many labels that count, as with
    padding. Here they count by these, as a pipelined Trainer has it. Without labels they count by
    their rows. For a model with a loss of its own, :meth:`MappedGPipe.verify` finds what counts.

    Args:
        pipe: the wrapper of a model of Transformers.
        output: what it has returned: the losses of micro-batches in shape ``(m,)``, alone, as
            ``"loss"`` or in front; or a list of that for each micro-batch.
        batch: the keyword arguments of the call; or a list of those of each micro-batch.

    Returns:
        The loss of all rows, of shape ``()``, on the device of the losses.

    Raises:
        ValueError: there is not one loss for each micro-batch, or the loss compares rows.
    """
    from transformers.utils.generic import find_labels

    names = find_labels(type(base_of(pipe.module)))
    if isinstance(batch, Mapping):
        call = ModelCall((), {**batch}, [], names, None)
        losses = loss_in(output)
    else:
        call = ModelCall((), {}, batch, names, None)
        losses = torch.stack([loss_in(x).reshape(()) for x in output])
    call.divide(pipe, pipe.chunks)
    if call.by_rows is not None:
        raise compared(pipe)
    if losses.shape != call.shares.shape:
        raise ValueError(
            "there must be one loss for each micro-batch of the mini-batch (losses: "
            f"{tuple(losses.shape)}, micro-batches: {len(call.shares)}); pass the output of "
            "pipe(**batch) with the same batch, or that of pipe(**Chunks.of(batches)) with the list"
        )
    return whole(losses, call.shares)


def loss_in(output: Any) -> Tensor:
    """The losses in what a model has returned."""
    if isinstance(output, Mapping):
        output = output["loss"]
    loss: Tensor = output[0] if isinstance(output, tuple) else output
    return loss


def is_stacked(name: str, value: Any, m: int, rows: int) -> bool:
    """Whether an output has a number for each micro-batch, where the model returns one.

    Args:
        name: the name of the output.
        value: the output, joined.
        m: the number of micro-batches.
        rows: the number of rows, which an output of one dimension has otherwise.
    """
    if not isinstance(value, Tensor) or value.shape != (m,) or not value.is_floating_point():
        return False
    # If each micro-batch has one row, a number for each row has this shape, too: the name decides.
    return m != rows or name.endswith("loss")


@contextmanager
def loss_only(model: nn.Module) -> Iterator[None]:
    """Have a model return its loss alone within a ``with`` block.

    The logits of all micro-batches, joined, would take more memory than anything else.
    """

    def keep_loss(model: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, dict):
            return {"loss": output["loss"]} if "loss" in output else output
        return output[:1] if isinstance(output, tuple) else output

    handle = model.register_forward_hook(keep_loss)
    try:
        yield
    finally:
        handle.remove()
