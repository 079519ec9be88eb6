"""The proof of a loss: what a pipeline makes of two rows is what the model itself makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.engine.unchanged import unchanged
from torchgpipe.mapped.hugging_face import IGNORED, base_of
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.transformers.children import ByRows, recorded, repeated, rows_of_calls
from torchgpipe.transformers.collating import KEY, random_state, restore_random_state
from torchgpipe.transformers.counting import WAYS, counts_by, shares_of, usual_way, whole
from torchgpipe.values.division import Division, FlatInput, row_count
from torchgpipe.values.marks import Chunks
from torchgpipe.values.microbatch import Batch, joined

__all__: list[str] = []


# A loss may weigh its rows equally, by their labels or by their tokens. Of some models the class
# tells. Of others it is found out before the first mini-batch is divided: two of its rows are
# computed, together and each alone, and these are compared for each way of weighing:
#
#   the loss of both rows    beside    the weighed losses of each
#
# Two rows with as many labels fit every way. So a copy is taken in which most labels of one are
# IGNORED. Code that does not know IGNORED might take it for an index: its labels are left as they
# are, and the proof waits until two rows differ by themselves.


#: The way of a loss that is computed once, of what children return for all rows.
ONCE = "once"

#: By dtype: how far losses differ by rounding, and from where on they are others, per unit of loss.
CLOSE = {torch.float64: (1e-9, 1e-7), torch.float32: (1e-5, 1e-4)}
HALF = 4e-3, 3e-2
OTHERS = 1e-4, 1e-3


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
        found = self._ways.get(call_key(kwargs))
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
        """Find out how the model's loss weighs its rows, unless that is known.

        Args:
            args: the positional arguments of the model.
            kwargs: its keyword arguments.
            given: where rows cannot be cut, the arguments of two micro-batches together, and then
                of each; else empty.
            rows: the number of rows, which counts only if ``given`` is empty.
            names: the arguments that are labels.
            strict: whether a loss of another kind is an error.

        Raises:
            ValueError: no way gives the loss of the model.
        """
        key, model = call_key(kwargs), self.pipe.module
        before = self._ways.get(key)
        if (before and len(before) == 1) or any(map(is_compiled, model.modules())):
            return
        k = 0
        if not given:
            ones = [1] * rows
            kwargs = differing(model, kwargs, names)
            ways = [x for x in before or WAYS if x != "sum"]
            counts = [counts_by(x, model, kwargs, names, ones).cpu() for x in ways]
            apart = told_apart(torch.stack(counts))
            differ = classes_differ(kwargs, names, rows)
            k = int((2 * apart + differ).argmax())
            if before and not apart[k]:
                return
            # Rows of one class do not show the weights of classes.
            is_open = has_classes(kwargs, names) and not is_of_library(model)
            if is_open and not differ[k]:
                return
            sizes = [size for size in (k, 2, rows - 2 - k) if size]
            both = [*FlatInput((args, kwargs)).split(Division(sizes))][k > 0]
            pairs = [both, *FlatInput(both).split(Division([1, 1]))]
        else:
            pairs = [(args, {**part}) for part in given]
            pairs[0][1].pop(KEY, None)
        found = self._compared(pairs, names, usual_way(model, kwargs), strict)
        lists = [x for x in kwargs.values() if type(x) is list]
        if before is None and is_of_library(model) and not lists:
            # Its labels were made to differ.
            del found[1:]
        if found:
            self._ways[key] = found

    def _compared(
        self, pairs: list[Any], names: Sequence[str], usual: str, strict: bool
    ) -> list[str]:
        """Compute two rows, or micro-batches, and find the ways that give the loss of both."""
        # Hooks of the wrapper are for steps.
        pipe, call, numbers = self.pipe, self.pipe.forward, random_state()
        model = pipe.module
        with torch.no_grad(), unchanged(model):
            model.eval()
            pipe.training = False
            try:
                with recorded(model, reduce=losses_in):
                    try:
                        outputs = run(call, model, pairs[:1])
                    except Exception:
                        # Code that fails in evaluation shows nothing of its loss.
                        return [usual]
                    try:
                        outputs += run(call, model, pairs[1:])
                    except Exception as error:
                        if not strict:
                            return [usual]
                        raise ValueError(
                            "the loss of a mini-batch must follow from those of its micro-batches, "
                            f"and the model ({type(base_of(model)).__name__}) computes two of its "
                            "parts together, but not each alone; compute the loss outside of the "
                            "model, by compute_loss_func, which gets the outputs of all rows, or "
                            "accept the loss of the micro-batches by accept_loss=True"
                        ) from error
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
                # Losses over objects have other parts, which are equal before training.
                best = min((x for x in ways if x != "objects"), key=off.__getitem__)
                for way in (usual, best):
                    if off[way] <= tight:
                        return [way, *(x for x in ways if x != way and off[x] <= tight)]
                calls = [calls for _, calls in outputs]
                # Micro-batches of several lengths cannot be joined.
                with suppress(ValueError):
                    if kept := rows_of_calls(calls[0], calls[1:], model):
                        sizes = [rows_in(own, names) for _, own in pairs[1:]]
                        given = joined_calls(kept, calls[1:], sizes)
                        once = losses_in(repeated(pipe, pairs[0][0], pairs[0][1], given))[0]
                        if once is not None and 4 * (once - target).abs() <= min(
                            off[best], 4 * near
                        ):
                            self.by_rows = kept
                            return [ONCE]
                if off[best] <= near:
                    return [usual if off[usual] <= 4 * off[best] else best]
                with recorded(model, reduce=losses_in):
                    twice = [*run(call, model, pairs[:1]), *run(call, model, pairs[:1])]
                # Some models draw a few numbers, which may be the same again.
                if strict and all((x - target).abs() <= near for (x, _), _ in twice):
                    found = float(self._weighed(usual, losses, pairs, names))
                    raise ValueError(
                        "the loss of a mini-batch must follow from those of its micro-batches, "
                        "weighed by labels, tokens or rows, or from what the model's children "
                        f"return for its rows ({type(base_of(model)).__name__}: "
                        f"{float(target):.6g} for two rows together, {found:.6g} for each alone, "
                        f"weighed by {usual}); pass compute_loss_func to the Trainer, which gets "
                        "the outputs of all rows, or accept the other loss by accept_loss=True"
                    )
                return [usual]
            finally:
                restore_random_state(numbers)
                torch.clear_autocast_cache()
                pipe.training = model.training

    def _weighed(self, way: str, losses: Tensor, pairs: list[Any], names: Sequence[str]) -> Tensor:
        """The loss that micro-batches have together in one of the ways."""
        model, rows = self.pipe.module, len(losses)
        each = [counts_by(way, model, x, names, [rows_in(x, names)]) for _, x in pairs[1:]]
        counts = torch.cat(each).cpu()
        return whole(losses, torch.ones(rows) if way == "sum" else shares_of(counts))


def call_key(kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The names of the arguments of a call, by which mini-batches with another loss are told."""
    return frozenset(name for name, x in kwargs.items() if x is not None)


def run(
    call: Callable[..., Any], model: nn.Module, parts: Sequence[tuple[tuple[Any, ...], Any]]
) -> list[Any]:
    """Compute micro-batches that are made already, of which some may have more arguments.

    Args:
        call: calls a wrapper.
        model: its model.
        parts: the arguments of each micro-batch.
    """
    names = dict.fromkeys(chain(*[kwargs for _, kwargs in parts]))
    args = [Chunks(values) for values in zip(*[args for args, _ in parts])]
    known = inspect.signature(model.forward).parameters
    defaults = {name: known[name].default if name in known else None for name in names}
    found: list[Any] = call(*args, **Chunks.of([{**defaults, **own} for _, own in parts]))
    return found


def losses_in(output: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The loss in an output of a model, and what routers have added to it."""
    found, extra = output, dict[str, Tensor]()
    if isinstance(output, Mapping):
        added = ("aux_loss", "z_loss")
        tensors = {key: x for key, x in output.items() if isinstance(x, Tensor)}
        extra = {key: x for key, x in tensors.items() if key.endswith(added)}
        found = output.get("loss")
    elif isinstance(output, tuple) and output:
        found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
        return found.reshape(()), extra
    return None, extra


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


def rows_in(kwargs: Mapping[str, Any], names: Sequence[str]) -> int:
    """The number of rows of a micro-batch, by its labels if it has any."""
    # Other tensors may have a row for each patch of an image.
    return row_count([kwargs.get(name) for name in names]) or row_count({**kwargs})


def told_apart(counts: Tensor) -> Tensor:
    """Count the ways that are told from each other by two rows in a row.

    Args:
        counts: those of each row in each way, of shape ``(ways, rows)``.
    """
    shares = counts[:, :-1] / (counts[:, :-1] + counts[:, 1:]).clamp(min=1)
    return ((shares[None] - shares[:, None]).abs() > 0.02).sum((0, 1))


def has_classes(kwargs: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether each row has a class for its label."""
    return any(is_class(kwargs.get(name)) for name in names)


def is_class(labels: Any) -> bool:
    """Whether labels are a class for each row."""
    return isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point()


def classes_differ(kwargs: Mapping[str, Any], names: Sequence[str], rows: int) -> Tensor:
    """Whether two rows in a row have other classes, of shape ``(rows - 1,)``."""
    labels = [x for x in map(kwargs.get, names) if isinstance(x, Tensor) and is_class(x)]
    found = [x[:-1] != x[1:] for x in labels if len(x) == rows]
    return torch.stack(found).any(0).long().cpu() if found else torch.zeros(rows - 1).long()


def closeness(model: nn.Module) -> tuple[float, float]:
    """Two limits: losses differ by rounding up to the first, and are others from the second on."""
    kinds = {x.dtype for x in model.parameters() if x.is_floating_point()}
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu") or not kinds <= {*CLOSE}:
        return HALF
    found = CLOSE[torch.float64 if kinds == {torch.float64} else torch.float32]
    # Accelerators choose other kernels for other shapes, some of which round their inputs.
    on_cpu = all(x.device.type == "cpu" for x in model.parameters())
    return found if on_cpu else max(found, OTHERS)


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
        # Some take the outputs at the places of answers.
        takes = hasattr(base_of(model).config, "start_n_top") if knows else True
        if x.dim() == 2 and (knows or bool((x == IGNORED).any())):
            # Few, so that the first one has a weight.
            most = (2 + 6 * odd).unsqueeze(1)
            found[name] = x.masked_fill((x != IGNORED).cumsum(1) > most, IGNORED)
        ids = kwargs.get("input_ids")
        if name.endswith("_positions") and not takes and isinstance(ids, Tensor):
            # Answers of which the end alone is cut off.
            length = ids.shape[1]
            found[name] = x % length if name[0] == "s" else torch.where(odd.bool(), length, x)
    return found


#: What is known of the losses of each wrapper.
weighings: WeakKeyDictionary[MappedGPipe, Weighing] = WeakKeyDictionary()


def weighing_of(pipe: MappedGPipe) -> Weighing:
    """Look up what is known of the losses of a wrapper."""
    return weighings.setdefault(pipe, Weighing(pipe))


def verify(pipe: MappedGPipe, batch: Mapping[str, Any]) -> str:
    """Prove that the losses of micro-batches make the loss of a mini-batch.

    See :meth:`MappedGPipe.verify`.
    """
    from transformers.utils.generic import find_labels

    names, rows = find_labels(type(base_of(pipe.module))), row_count({**batch})
    weighing = weighing_of(pipe)
    if rows > 1:
        weighing.prove((), {**batch}, [], rows, names, strict=True)
    way = weighing.way(batch)
    if way == ONCE:
        raise compared(pipe)
    return way


def compared(pipe: MappedGPipe) -> ValueError:
    """The error where the losses of micro-batches do not make that of the mini-batch."""
    return ValueError(
        "the loss of a mini-batch must follow from those of its micro-batches (model: "
        f"{type(base_of(pipe.module)).__name__}, which compares rows, or has several losses); "
        "compute it outside of the model, of the outputs of all rows, or use a pipelined Trainer"
    )
