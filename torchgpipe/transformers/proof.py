"""The proof of a loss: what a pipeline makes of two rows is what the model itself makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.planner.blocks import unchanged
from torchgpipe.transformers.children import ByRows, recorded, repeated, rows_of_calls
from torchgpipe.transformers.collating import KEY, random_state, restore_random_state
from torchgpipe.transformers.counting import (
    IGNORED,
    WAYS,
    base_of,
    counts_by,
    shares_of,
    usual_way,
    whole,
)
from torchgpipe.values.division import Division, row_count, split
from torchgpipe.values.marks import Chunks
from torchgpipe.values.microbatch import Batch, joined

__all__: list[str] = []


# Models weigh their rows in several ways, and their classes tell it for some. So before the first
# mini-batch is divided, two of its rows are computed, together and each alone, and the ways of
# weighing are compared:
#
#   the loss of both rows    beside    the weighed losses of each
#
# Rows of equal counts prove nothing, so all but a few labels are left out in a copy. A label of
# IGNORED may be an index to code that does not know it. Such code waits for rows that differ.


#: The way of a loss that is computed once, of what children return for all rows.
ONCE = "once"

#: By dtype: how far losses differ by rounding, and from where on they are others, per unit of loss.
CLOSE = {torch.float64: (1e-9, 1e-7), torch.float32: (2e-6, 5e-5)}
HALF = 4e-3, 3e-2


class Weighing:
    """The ways in which the losses of a wrapper's model weigh their rows, once these are known.

    Args:
        pipe: the wrapper.
    """

    def __init__(self, pipe: MappedGPipe) -> None:
        self._pipe = ref(pipe)
        #: By the arguments: ways that no mini-batch has told from each other, the chosen one first.
        self._ways: dict[frozenset[str], list[str]] = {}
        #: The calls of children that are kept for a loss that is computed once.
        self.by_rows: ByRows = {}

    @property
    def pipe(self) -> MappedGPipe:
        """The wrapper."""
        found = self._pipe()
        assert found is not None
        return found

    def way(self, kwargs: Mapping[str, Any]) -> str:
        """The way for a mini-batch, by the keyword arguments of the model."""
        found = self._ways.get(key_of(kwargs))
        return found[0] if found else usual_way(self.pipe.module, kwargs)

    def prove(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Mapping[str, Any]],
        rows: int,
        names: Sequence[str],
        *,
        strict: bool,
    ) -> None:
        """Find the way, if that is not known yet.

        Args:
            args: the arguments of the model.
            kwargs: the same.
            given: those of two micro-batches together, and of each, if rows cannot be cut.
            rows: the number of rows otherwise.
            names: the arguments that are labels.
            strict: whether a loss of another kind is an error.

        Raises:
            ValueError: no way gives the loss of the model.
        """
        key, model = key_of(kwargs), self.pipe.module
        before = self._ways.get(key)
        if (before and len(before) == 1) or any(map(is_compiled, model.modules())):
            return
        k = 0
        if not given:
            ones = [1] * rows
            kwargs = differing(model, kwargs, names)
            ways = [x for x in before or WAYS if x != "sum"]
            counts = [counts_by(x, model, kwargs, names, ones).cpu() for x in ways]
            told = told_apart(torch.stack(counts))
            k = int(told.argmax())
            if before and not told[k]:
                return
            sizes = [size for size in (k, 2, rows - 2 - k) if size]
            both = [*split((args, kwargs), Division(sizes))][k > 0]
            pairs = [both, *split(both, Division([1, 1]))]
        else:
            pairs = [(args, {**part}) for part in given]
            pairs[0][1].pop(KEY, None)
        found = self._compared(pairs, names, usual_way(model, kwargs), strict)
        if before is None and is_of_library(model) and "objects" not in found:
            # Its labels were made to differ.
            del found[1:]
        if found:
            self._ways[key] = found

    def _compared(
        self, pairs: list[Any], names: Sequence[str], usual: str, strict: bool
    ) -> list[str]:
        """Compute two rows, or micro-batches, and find the ways that give the loss of both."""
        model, pipe, numbers = self.pipe.module, self.pipe, random_state()
        with torch.no_grad(), unchanged(model):
            model.eval()
            pipe.training = False
            try:
                with recorded(model, reduce=losses_in):
                    outputs = run(pipe, pairs[:1]) + run(pipe, pairs[1:])
                (target, extra), *each = [output for output, _ in outputs]
                if target is None or not target.isfinite():
                    return [usual] if target is None else []
                losses = torch.stack([loss for loss, _ in each]).cpu().double()
                # What routers add becomes a mean, which differs by its own size.
                others = zip(extra.values(), *[own.values() for _, own in each])
                slack = sum(float((x - sum(own) / len(own)).abs()) for x, *own in others)
                tight, near = [x * max(1.0, float(target.abs())) + slack for x in closeness(model)]
                off = {
                    way: float((self._weighed(way, losses, pairs, names) - target.cpu()).abs())
                    for way in WAYS
                }
                off = {way: float("inf") if x != x else x for way, x in off.items()}
                ways = [usual, *sorted({*WAYS} - {usual}, key=off.__getitem__)]
                best = min(ways, key=off.__getitem__)
                if off[usual] <= max(tight, min(near, 4 * off[best])):
                    return [x for x in ways if off[x] <= max(tight, off[usual])]
                if off[best] <= near:
                    return [
                        best,
                        *(x for x in ways if x != best and off[x] <= max(tight, 4 * off[best])),
                    ]
                calls = [calls for _, calls in outputs]
                found = rows_of_calls(calls[0], calls[1:], model)
                if found:
                    given = joined_calls(found, calls[1:], [row_count(x) for _, x in pairs[1:]])
                    once = losses_in(repeated(pipe, *pairs[0], given))[0]
                    if (once - target).abs() <= near:
                        self.by_rows = found
                        return [ONCE]
                with recorded(model, reduce=losses_in):
                    (((again, _), _),) = run(pipe, pairs[:1])
                if strict and (again - target).abs() <= near:
                    raise ValueError("...")
                return [usual]
            finally:
                restore_random_state(numbers)
                torch.clear_autocast_cache()
                pipe.training = model.training

    def _weighed(self, way: str, losses: Tensor, pairs: list[Any], names: Sequence[str]) -> Tensor:
        """The loss that micro-batches have together in one of the ways."""
        model, rows = self.pipe.module, len(losses)
        each = [counts_by(way, model, own, names, [row_count(own)]) for _, own in pairs[1:]]
        counts = torch.cat(each).cpu()
        return whole(losses, torch.ones(rows) if way == "sum" else shares_of(counts))


def key_of(kwargs: Mapping[str, Any]) -> frozenset[str]:
    """What tells mini-batches with another loss: their arguments."""
    return frozenset(name for name, x in kwargs.items() if x is not None)


def run(pipe: MappedGPipe, parts: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
    """Compute micro-batches that are made already, of which some may have more arguments."""
    names = dict.fromkeys(chain(*[kwargs for _, kwargs in parts]))
    args = [Chunks(values) for values in zip(*[args for args, _ in parts])]
    known = inspect.signature(pipe.module.forward).parameters
    defaults = {name: known[name].default if name in known else None for name in names}
    found: list[Any] = pipe(*args, **Chunks.of([{**defaults, **own} for _, own in parts]))
    return found


def losses_in(output: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The loss in an output of a model, and what routers have added to it."""
    if isinstance(output, Mapping):
        added = ("aux_loss", "z_loss")
        extra = {
            key: x for key, x in output.items() if key.endswith(added) and isinstance(x, Tensor)
        }
        found = output.get("loss")
    else:
        extra, found = {}, output[0] if isinstance(output, tuple) and output else output
    is_loss = isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point()
    return (found.reshape(()) if is_loss else None), extra


def joined_calls(
    by_rows: ByRows, each: Sequence[Mapping[str, list[Any]]], sizes: list[int]
) -> dict[str, list[Any]]:
    """Join what children have returned for micro-batches."""
    rows = Division(sizes)
    return {
        name: [
            joined([Batch(x) for x in outputs], rows) if keep else None
            for keep, *outputs in zip(calls, *[own[name] for own in each])
        ]
        for name, calls in by_rows.items()
    }


def told_apart(counts: Tensor) -> Tensor:
    """Count the ways that are told from each other by two rows in a row.

    Args:
        counts: those of each row in each way, of shape ``(ways, rows)``.
    """
    shares = counts[:, :-1] / (counts[:, :-1] + counts[:, 1:]).clamp(min=1)
    return ((shares[None] - shares[:, None]).abs() > 0.02).sum((0, 1))


def closeness(model: nn.Module) -> tuple[float, float]:
    """How far losses differ by rounding, and from where on they are others."""
    kinds = {x.dtype for x in model.parameters() if x.is_floating_point()}
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu") or not kinds <= {*CLOSE}:
        return HALF
    return CLOSE[torch.float64 if kinds == {torch.float64} else torch.float32]


def is_of_library(model: nn.Module) -> bool:
    """Whether the class of a model is of Transformers, and not of a user."""
    return type(base_of(model)).__module__.startswith("transformers.")


def differing(model: nn.Module, kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Have the labels of rows differ in number, if the model's code knows :data:`IGNORED`."""
    code = getattr(inspect.unwrap(type(base_of(model)).forward), "__code__", None)
    used = code.co_names if code is not None and is_of_library(model) else ()
    found = {**kwargs}
    for name in names:
        x = kwargs.get(name)
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool:
            continue
        odd = torch.arange(len(x), device=x.device) % 2
        knows = "loss_function" in used or "CrossEntropyLoss" in used
        if x.dim() == 2 and (knows or bool((x == IGNORED).any())):
            # Few, so that the first one has a weight.
            most = (2 + 6 * odd).unsqueeze(1)
            found[name] = x.masked_fill((x != IGNORED).cumsum(1) > most, IGNORED)
        ids = kwargs.get("input_ids")
        if name == "end_positions" and "loss_function" in used and isinstance(ids, Tensor):
            # Answers that are cut off.
            found[name] = torch.where(odd.bool(), ids.shape[1], x)
    return found


#: What is known of the losses of each wrapper.
weighings: WeakKeyDictionary[MappedGPipe, Weighing] = WeakKeyDictionary()


def weighing_of(pipe: MappedGPipe) -> Weighing:
    """What is known of the losses of a wrapper."""
    return weighings.setdefault(pipe, Weighing(pipe))
