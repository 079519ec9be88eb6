"""The loss of each micro-batch after the last stage, and its targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from numbers import Real
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient import labels
from torchgpipe.ambient.notes import add_note
from torchgpipe.ambient.notes import layer as current
from torchgpipe.checks import verify_number
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.links import fetch
from torchgpipe.partition.arguments import objects_in, verify_filled
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.division import Division, FlatInput, divided
from torchgpipe.values.marks import Chunks, tensors_in
from torchgpipe.values.microbatch import Batch, joined
from torchgpipe.values.structure import Arguments

__all__: list[str] = []


class Criterion:
    """A loss function, and what it has made of each micro-batch of a step.

    Args:
        loss: takes an output of the last stage and the arguments; returns the mean over the rows
            of the micro-batch, or a sum and the weight that the sum of all is divided by. None
            where no loss is computed, but outputs are kept.
        arguments: the further arguments of each micro-batch, positional and by name.
        division: the division of the input. A micro-batch has the share of its rows in a mean; if
            the caller has divided all, each has the same.
        scale: multiplies losses before backward, against gradients that are too small for float16.
        outputs: whether outputs are kept.
        weight_of: takes the arguments of a micro-batch; returns the weight of its sum.
    """

    def __init__(
        self,
        loss: Callable[..., Any] | None,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        division: Division,
        scale: Callable[[Tensor], Tensor] | None,
        outputs: bool,
        weight_of: Callable[..., Any] | None = None,
    ) -> None:
        self.loss, self.arguments, self.scale = loss, arguments, scale
        self.weight_of = weight_of
        self.division, rows = division, sum(division.sizes)
        self.shares = [size / rows if rows else 1 / division.m for size in division.sizes]
        m = len(arguments)
        #: Each micro-batch's loss, with its weight (None for a mean); None until it is computed.
        self.losses: list[tuple[Tensor, Any] | None] = [None] * m
        #: For each micro-batch, its output, detached from autograd's graph, or None until it is
        #: computed. If no outputs are kept, None in place of the list.
        self.outputs: list[Batch | None] | None = [None] * m if outputs else None
        #: The shapes of tensors in micro-batch 0's output, from which Traps.coupled() tells whether
        #: layers compare rows with each other. Empty with FX graphs, where that is not looked at.
        self.shapes: Sequence[torch.Size] = ()
        #: Whether any micro-batch's loss requires a gradient, so that the step's loss does, too.
        self.depends = False

    def after(self, i: int) -> Callable[[Batch], Batch]:
        """A function that makes the loss of micro-batch ``i`` of the output."""
        return partial(self._loss, i)

    def _loss(self, i: int, output: Batch) -> Batch:
        if self.loss is None:
            self._keep(i, output)
            return output
        args, kwargs = self.arguments[i]
        if i == 0:
            self.shapes = output.shapes
        loss, weight = self.compute(output, args, kwargs)
        if not is_recomputing():
            self.take(i, loss, weight, output)
        return Batch(loss)

    def compute(
        self, output: Batch, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        """Compute the loss of an output, and its weight; None for a mean.

        Raises:
            TypeError: the loss function has returned something else.
        """
        assert self.loss is not None
        current.name, current.kind = "loss", type(self.loss).__name__
        is_observed = labels.observer is not None
        if is_observed:
            labels.put_layer("loss", getattr(self.loss, "__name__", type(self.loss).__name__))
        result = _checked(self.loss(output.value, *args, **kwargs))
        current.name = None
        if is_observed:
            labels.put_layer("", "")
        return result

    def take(self, i: int, loss: Tensor, weight: Any, output: Batch | None) -> None:
        """Take note of the loss of micro-batch ``i``, and of the output of the layers."""
        weight = self._weights[i] if self._weights else weight
        # The scalar that F.mse_loss() returns keeps memory for a number per element of its input,
        # and some other losses do so, too. A clone keeps the memory of one number.
        spacious = loss.untyped_storage().nbytes() > loss.nbytes
        self.losses[i] = loss.detach().clone() if spacious else loss.detach(), weight
        self.depends |= loss.requires_grad
        if self.outputs is not None and output is not None:
            self._keep(i, output)

    def _keep(self, i: int, output: Batch) -> None:
        assert self.outputs is not None
        self.outputs[i] = output.map(lambda *xs: [x.detach() for x in xs], output.parts)

    @cached_property
    def _weights(self) -> list[Any]:
        """The weights of all micro-batches, if a function of the arguments tells them."""
        weight_of = self.weight_of
        if weight_of is None:
            return []
        with torch.no_grad():
            return [_checked_weight(weight_of(*args, **kw)) for args, kw in self.arguments]

    @cached_property
    def _divisor(self) -> Tensor | None:
        """The sum of the weights; None for means, or if the first backward asks for it too early.

        What a layer adds to gradients on its own must not be divided by the weights afterwards. So
        gradients begin divided, if all weights are known before the first backward.
        """
        known = self._weights or [None if x is None else x[1] for x in self.losses]
        (loss, _) = next(x for x in self.losses if x is not None)
        return None if any(x is None for x in known) else _total(known, loss)

    def grad(self, i: int) -> Tensor:
        """The gradient of the loss of micro-batch ``i``, with which its backward begins."""
        pair = self.losses[i]
        assert pair is not None
        loss, weight = pair
        if self._divisor is None:
            grad = torch.full_like(loss, 1 if weight is not None else self.shares[i])
        else:
            # 1 / divisor may be too small for float16, so the scale is applied before the cast.
            grad = torch.full_like(loss, 1, dtype=self._divisor.dtype) / self._divisor
        return (grad if self.scale is None else self.scale(grad)).to(loss.dtype)

    def results(self, i: int) -> list[Tensor]:
        """The tensors of micro-batch ``i`` that go to the caller."""
        pair = self.losses[i]
        output = None if self.outputs is None else self.outputs[i]
        results = [] if pair is None else [x for x in pair if isinstance(x, Tensor)]
        return results if output is None else [*results, *output]

    def joined(self, blocks: Container[int]) -> Any:
        """The outputs of all micro-batches: see :func:`~torchgpipe.values.microbatch.joined`."""
        assert self.outputs is not None
        return joined([x for x in self.outputs if x is not None], self.division, blocks)

    def total(self) -> tuple[Tensor, Tensor | None]:
        """The loss of the mini-batch, and what its gradients are still to be divided by, if at all.

        Raises:
            TypeError: some micro-batches had a weight, and others had none.
        """
        pairs = [pair for pair in self.losses if pair is not None]
        losses = torch.stack([loss.reshape(()) for loss, _ in pairs])
        losses = losses.to(_dtype_of_sums(losses))
        weights = [weight for _, weight in pairs]
        if all(weight is None for weight in weights):
            # Each share is a Python number, which becomes an argument of a kernel. A tensor of
            # shares would be copied to the device, and the host would wait for the copy.
            terms = [
                losses[start : start + count].sum() * share
                for share, start, count in _runs(self.shares)
            ]
            return sum(terms[1:], terms[0]), None
        if any(weight is None for weight in weights):
            raise TypeError(
                "a loss function must return a mean for all micro-batches, or (sum, weight) for "
                f"all (weights: {weights}); return the same for each"
            )
        # The weights are added up again, though self._divisor may be their sum: its memory belongs
        # to the last stage's stream, which may reuse it before the current stream has read it.
        total = _total(weights, losses)
        return losses.sum() / total, total if self._divisor is None else None


def _dtype_of_sums(loss: Tensor) -> torch.dtype:
    # A sum over all tokens may be too large for float16, and bfloat16 would round it.
    return torch.float32 if loss.dtype in (torch.float16, torch.bfloat16) else loss.dtype


def _total(weights: Sequence[Any], loss: Tensor) -> Tensor:
    """The sum of weights, of shape ``()``, where a loss is."""
    dtype, device = _dtype_of_sums(loss), loss.device
    scalars = [
        x.to(device).reshape(()).to(dtype)
        if isinstance(x, Tensor) and x.device != CPU
        # A kernel fills in the number. If it were copied to the device, the host would wait.
        else torch.full((), float(x), dtype=dtype, device=device)
        for x in weights
    ]
    return torch.stack(scalars).sum()


def _runs(values: Sequence[float]) -> Iterator[tuple[float, int, int]]:
    """Each value that comes several times in a row, with its first place and its count."""
    start = 0
    for value, same in groupby(values):
        count = len([*same])
        yield value, start, count
        start += count


def _checked(returned: Any) -> tuple[Tensor, Any]:
    loss, weight = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            "a loss function must return the mean over the rows of its micro-batch, a tensor of "
            f"one element, or (sum, weight) (returned: {what}); reduce it with mean(), or return "
            "the sum and the number of what was summed up"
        )
    return loss, None if weight is None else _checked_weight(weight)


def _checked_weight(weight: Any) -> Any:
    number = isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex()
    if not number and not isinstance(weight, Real):
        raise TypeError(
            "the second of two things that a loss function returns, and what weight_of returns, is "
            "the weight of the sum, a number or a tensor of one element (returned: "
            f"{type(weight).__name__}); return the loss alone, and get outputs by "
            "ScheduledLoss(..., outputs=True)"
        )
    if isinstance(weight, Tensor):
        # The number in a tensor stays unchecked: to read it, the host would wait for the device.
        return weight.detach()
    rule = "the weight of a loss must be finite and not negative"
    verify_number(weight + 0, rule, "weight", "return the number of what was summed up")
    return float(weight)


class explaining:
    """Note on an error within a ``with`` block that all but the first argument go to the loss."""

    def __init__(self, targets: Sequence[Any], layer: nn.Module | None) -> None:
        self._targets, self._layer = targets, layer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._targets or self._layer is None or not isinstance(error, TypeError):
            return
        # The note is for the error "forward() missing ...", by a layer that gets too few arguments.
        name = getattr(type(self._layer).forward, "__qualname__", "")
        if str(error).startswith(f"{name}() missing"):
            add_note(
                error,
                "the model gets the first argument of a step, and the loss gets all others "
                f"(for the loss: {len(self._targets)}); pass several arguments of the first layer "
                "as one, torchgpipe.arguments(...)",
            )


def arguments_of(
    value: Any, division: Division, pool: StreamPool, device: torch.device
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[Any]]:
    """The arguments of the loss for each micro-batch, and the events of their copies.

    Raises:
        ValueError: the arguments have other rows than the input, or require a gradient.
    """
    m, rows = division.m, sum(division.sizes)
    targets = FlatInput(Arguments(*value), rows or None)
    targets.verify_dense(m, lambda name: f"argument: {_path(name)}")
    for k, leaf in enumerate(targets.leaves):
        for x in tensors_in(leaf):
            if x.is_meta:
                verify_filled(x, _path(targets.names[k]), [device])
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    "targets must not require a gradient, since the loss hands over those of its "
                    f"input and weights (argument: {_path(targets.names[k])}, shape: "
                    f"{tuple(x.shape)}); pass target.detach(), or make it an input that the layers "
                    "pass on"
                )
        if isinstance(leaf, Chunks) and len(leaf) != m:
            raise ValueError(
                "targets that are divided must be as many as the micro-batches of the input "
                f"(argument: {_path(targets.names[k])}, entries: {len(leaf)}, micro-batches: {m}); "
                "divide both in the same way"
            )
    counts = targets.counts
    if division.is_ready and counts:
        # The caller has divided the input, so its number of rows is unknown. Targets tell it.
        rows = targets.rows
        if rows < m:
            raise ValueError(
                "targets must have a row for each micro-batch that Chunks has made (argument: "
                f"{_path(next(iter(targets.shapes)))}, rows: {rows}, micro-batches: {m}); "
                "divide them, too, or pass torchgpipe.NoChunk(value)"
            )
        division = division._replace(sizes=divided(rows, m))
    if m > 1 and any(n != rows for n in counts):
        name, shape = next(x for x, n in zip(targets.shapes.items(), counts) if n != rows)
        raise ValueError(
            "targets must have as many rows as the input, since each micro-batch takes the same "
            f"rows of all (argument: {_path(name)}, shape: {shape}, rows: {rows}); pass "
            "what every micro-batch shall get whole as torchgpipe.NoChunk(value), and what has its "
            "rows in another dimension as torchgpipe.Chunk(tensor, dim=1)"
        )
    objects = objects_in(targets) if rows and m > 1 else {}
    if unsplit := [_path(name) for name, x in objects.items() if _has_entries(x, rows)]:
        raise ValueError(
            "targets must be tensors to be split into micro-batches "
            f"(lists or arrays with an entry for each row: {', '.join(unsplit)}, rows: {rows}); "
            "pass a tensor, what every micro-batch shall get whole as torchgpipe.NoChunk(value), "
            "or what is divided already as torchgpipe.Chunks(values)"
        )
    events = fetch(pool, targets, device)
    return [targets.whole] if m == 1 else [*targets.split(division)], events


def _has_entries(value: Any, rows: int) -> bool:
    """Whether an object without tensors has an entry for each row."""
    shape = (len(value),) if isinstance(value, list) else getattr(value, "shape", ())
    return tuple(shape)[:1] == (rows,)


def _path(name: str) -> str:
    """The path to a leaf among the arguments of a step, as its caller knows it."""
    if name.startswith("leaf"):
        return f"targets, {name}"
    return re.sub(r"^kwargs\['(\w+)'\]|^args", lambda match: match[1] or "targets", name)
