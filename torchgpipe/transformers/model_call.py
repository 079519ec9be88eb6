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
        given: the keyword arguments of each micro-batch, if the mini-batch cannot be cut by rows.
        names: the arguments that are labels.
        device: where outputs go to; None if they stay where they are.
        strict: whether to prove how rows are weighed, and another loss is an error; None without a
            proof.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        device: torch.device | None,
        strict: bool | None = None,
    ) -> None:
        self.args, self.kwargs = args, {**kwargs}
        self._strict = strict
        self._names, self._device = names, device
        self._items = self.kwargs.pop("num_items_in_batch", None)
        self._own = self.kwargs
        self._given = [{**part} for part in given]
        self._is_one_row = bool(self._given) and row_count(kwargs) == 1

    def divide(self, pipe: MappedGPipe, chunks: int) -> None:
        """Divide the mini-batch, and tell what each micro-batch counts in its loss."""
        if self._given:
            sizes = [rows_in(part, self._names) for part in self._given]
            self.division = Division(sizes)
        else:
            self.kwargs = self._own
            self.division = FlatInput((self.args, self.kwargs)).division(chunks)
            sizes = self.division.sizes
        model, weighing = pipe.module, weighing_of(pipe)
        if self._strict is not None and self.division.m > 1:
            # One row of packed sequences is not what its parts are alone.
            first = [] if self._is_one_row else self._given[:2]
            given = [as_one_batch(first, False), *first] if first else []
            if given or not self._given:
                weighing.prove(
                    *(self.args, self._own, given, sum(sizes), self._names), strict=self._strict
                )
        way = weighing.way(self._own)
        #: The calls of children to keep, if the loss is computed once, of all rows.
        self.by_rows = weighing.by_rows if way == ONCE and not self._is_one_row else None
        wholes = [*zip(self._given, ([n] for n in sizes))] or [(self.kwargs, sizes)]
        counts = torch.cat([counts_by(way, model, own, self._names, n) for own, n in wholes])
        if next(pipe.parameters(), counts).dtype == torch.float64:
            counts = counts.double()
        items = None if self._items is None else told(counts, self._items)
        for part, count in zip(self._given, items or ()):
            part["num_items_in_batch"] = count
        if items is not None and not self._given:
            self.kwargs = {**self._own, "num_items_in_batch": Chunks(items)}
        # One micro-batch is the mini-batch, whatever counts in it.
        self.shares = (
            torch.ones_like(counts)
            if way == "sum" or len(counts) == 1
            else shares_of(counts, alone=self._items is None)
        )

    def sample(self, model: nn.Module, chunks: int) -> dict[str, Any]:
        """The arguments of the first micro-batch, by name, before the mini-batch is divided."""
        args, kwargs = self.args, self._given[0] if self._given else self.kwargs
        if not self._given:
            flat = FlatInput((args, kwargs))
            args, kwargs = next(flat.split(flat.division(chunks)))
        return {**dict(zip(signature(model.forward).parameters, args)), **kwargs}

    @property
    def is_given(self) -> bool:
        """Whether the micro-batches are made already."""
        return bool(self._given)

    def parts(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each micro-batch."""
        if self._given:
            return ((self.args, part) for part in self._given)
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
        found = [Batch(x) for x in outputs]
        if not self._given:
            return joined(found, self.division)
        tensors = [in_one(column, self._is_one_row) for column in zip(*found)]
        return found[0].replace(tensors).value

    def once(self, pipe: MappedGPipe, output: Any) -> Any:
        """Compute the loss of all rows at once, of what the model's children have returned."""
        if self.by_rows is None:
            return output
        items = {} if self._items is None else {"num_items_in_batch": self._items}
        whole = Division([sum(self.division.sizes)])
        ((args, kwargs),) = FlatInput((self.args, {**self._own, **items})).split(whole)
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
            found = there(output).items()
            losses = {
                key: finished(key, x)
                for key, x in found
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
    # Trainer has set the mode of the model.
    pipe.training = pipe.module.training
    if len({len(x.args) for x in calls}) > 1:
        # They give arguments to the model in several ways.
        return [compute(pipe, [x])[0] for x in calls]
    chunks = -(-pipe.chunks // len(calls))
    for call in calls:
        call.divide(pipe, chunks)
    by_rows = calls[0].by_rows
    if any(x.by_rows is not by_rows for x in calls):
        return [compute(pipe, [x])[0] for x in calls]
    with nullcontext() if by_rows is None else recorded(pipe.module, by_rows):
        if len(calls) == 1 and not calls[0].is_given:
            found = [pipe(*calls[0].args, **calls[0].kwargs)]
        else:
            parts = [*chain(*[call.parts() for call in calls])]
            outputs = iter(run(pipe, pipe.module, parts))
            found = [call.joined([*islice(outputs, call.division.m)]) for call in calls]
    return [call.finished(call.once(pipe, x)) for call, x in zip(calls, found)]


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
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


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
    # Where each micro-batch has one row, the shape says nothing.
    return m != rows or name.endswith("loss")


@contextmanager
def loss_only(model: nn.Module) -> Iterator[None]:
    """Have a model return its loss alone within a ``with`` block.

    The logits of all micro-batches, joined, would take more memory than anything else.
    """

    def alone(model: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, dict):
            return {"loss": output["loss"]} if "loss" in output else output
        return output[:1] if isinstance(output, tuple) else output

    handle = model.register_forward_hook(alone)
    try:
        yield
    finally:
        handle.remove()
