"""The call of a model for a mini-batch: its micro-batches, and the loss of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.on_demand import can_fill_itself, on_reading, there
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.transformers.collating import in_one
from torchgpipe.transformers.counting import (
    IGNORED,
    base_of,
    counts_of,
    ctc_reduction,
    ignored_pixels,
    shares_of,
    shifts_labels,
    told,
    whole,
)
from torchgpipe.values.division import Division, division_of, row_count, split
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
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        device: torch.device | None,
    ) -> None:
        self.args, self.kwargs = args, {**kwargs}
        self._names, self._device = names, device
        self._items = self.kwargs.pop("num_items_in_batch", None)
        self._own = self.kwargs
        self._given = [{**part} for part in given]
        self._is_one_row = bool(self._given) and row_count(kwargs) == 1

    def divide(self, pipe: MappedGPipe, chunks: int) -> None:
        """Divide the mini-batch, and tell what each micro-batch counts in its loss."""
        if self._given:
            # Other tensors may have a row for each patch of an image.
            labels = [[part.get(name) for name in self._names] for part in self._given]
            sizes = [row_count(own) or row_count(part) for own, part in zip(labels, self._given)]
            self.division = Division(sizes)
        else:
            self.kwargs = self._own
            self.division = division_of((self.args, self.kwargs), chunks)
            sizes = self.division.sizes
        model = pipe.module
        shifted = shifts_labels(model) and "shift_labels" not in self.kwargs
        reduction = ctc_reduction(model)
        wholes = [*zip(self._given, ([n] for n in sizes))] or [(self.kwargs, sizes)]
        counts = torch.cat(
            [
                counts_of([] if reduction else self._labels(model, own, sum(n)), n, shifted)
                for own, n in wholes
            ]
        )
        if next(pipe.parameters(), counts).dtype == torch.float64:
            counts = counts.double()
        items = None if self._items is None else told(counts, self._items)
        for part, count in zip(self._given, items or ()):
            part["num_items_in_batch"] = count
        if items is not None and not self._given:
            self.kwargs = {**self._own, "num_items_in_batch": Chunks(items)}
        is_sum = reduction == "sum"
        self.shares = (
            torch.ones_like(counts) if is_sum else shares_of(counts, alone=self._items is None)
        )

    def sample(self, model: nn.Module, chunks: int) -> dict[str, Any]:
        """The arguments of the first micro-batch, by name, before the mini-batch is divided."""
        args, kwargs = self.args, self._given[0] if self._given else self.kwargs
        if not self._given:
            args, kwargs = next(split((args, kwargs), division_of((args, kwargs), chunks)))
        return {**dict(zip(signature(model.forward).parameters, args)), **kwargs}

    @property
    def is_given(self) -> bool:
        """Whether the micro-batches are made already."""
        return bool(self._given)

    def parts(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each micro-batch."""
        if self._given:
            return ((self.args, part) for part in self._given)
        return split((self.args, self.kwargs), self.division)

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

    def finished(self, output: Any) -> Any:
        """Combine the losses of all micro-batches into one, and move outputs to their device.

        An output that can fill itself moves all but losses when one is read.
        """
        m, rows = self.division.m, sum(self.division.sizes)

        def finished(name: str, value: Any) -> Any:
            if is_stacked(name, value, m, rows):
                return whole(value, self.shares).to(self._device)
            return map_leaves(self._arrived, value)

        if can_fill_itself(output):
            found = there(output).items()
            losses = {key: finished(key, x) for key, x in found if is_stacked(key, x, m, rows)}
            return on_reading(output, losses, lambda: map_leaves(self._arrived, {**output}))
        if isinstance(output, tuple):
            return tuple([finished("" if k else "loss", x) for k, x in enumerate(output)])
        if not isinstance(output, dict):
            return finished("", output)
        for name in [*output]:
            output[name] = finished(name, output[name])
        return output

    def _labels(self, model: nn.Module, kwargs: dict[str, Any], rows: int) -> list[Tensor]:
        if "shift_labels" in kwargs:
            return [kwargs["shift_labels"]]
        mask = kwargs.get("bool_masked_pos")
        found = [kwargs.get(name) for name in self._names if name != "bool_masked_pos"]
        ids = kwargs.get("input_ids")
        if isinstance(ids, Tensor) and any(name.endswith("_positions") for name in self._names):
            # An answer after the end of its row counts nowhere.
            found = [x if x is None else x.masked_fill(x >= ids.shape[1], IGNORED) for x in found]
        labels = [x for x in found if isinstance(x, Tensor) and x.dim() and len(x) == rows]
        pixels = ignored_pixels(model)
        labels = [x.masked_fill(x == pixels, IGNORED) if x.dim() > 2 else x for x in labels]
        # Labels that are truth values all count; those of a mask say what counts.
        labels = [x.int() if x.dtype == torch.bool else x for x in labels]
        if not isinstance(mask, Tensor):
            return labels
        # Of images as labels the masked patches count.
        return [mask, *(x for x in labels if not x.is_floating_point())]

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
    if len(calls) == 1 and not calls[0].is_given:
        return [calls[0].finished(pipe(*calls[0].args, **calls[0].kwargs))]
    parts = [*chain(*[call.parts() for call in calls])]
    names = dict.fromkeys(chain(*[kwargs for _, kwargs in parts]))
    args = [Chunks(values) for values in zip(*[args for args, _ in parts])]
    known = signature(pipe.module.forward).parameters
    defaults = {name: known[name].default if name in known else None for name in names}
    kwargs = Chunks.of([{**defaults, **own} for _, own in parts])
    outputs = iter(pipe(*args, **kwargs))
    return [call.finished(call.joined([*islice(outputs, call.division.m)])) for call in calls]


def loss_of(
    pipe: MappedGPipe, output: Any, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> Tensor:
    """The loss of a mini-batch, of the losses that a model returns for its micro-batches.

    ::

        loss = loss_of(pipe, pipe(**batch), batch)
        loss = loss_of(pipe, pipe(**Chunks.of(batches)), batches)

    A mean over micro-batches is another loss if they have unequally many labels that count, as with
    padding. Here they count by these, as a pipelined Trainer has it. Without labels they count by
    their rows.

    Args:
        pipe: the wrapper of a model of Transformers.
        output: what it has returned: the losses of micro-batches in shape ``(m,)``, alone, as
            ``"loss"`` or in front; or a list of that for each micro-batch.
        batch: the keyword arguments of the call; or a list of those of each micro-batch.

    Returns:
        The loss of all rows, of shape ``()``, on the device of the losses.

    Raises:
        ValueError: there is not one loss for each micro-batch.
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
def loss_alone(model: nn.Module) -> Iterator[None]:
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
