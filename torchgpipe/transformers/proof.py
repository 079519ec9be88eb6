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


# A loss may weigh its rows equally, by their labels or by their tokens. A model's class suggests
# one of these ways. The proof finds the right one before the first mini-batch is divided: two of
# its rows are computed together, and each alone. A way of weighing fits if these are equal:
#
#   the loss of both rows together    and    the losses of each row alone, weighed
#
# Two rows with equally many labels fit every way. So in a copy all labels but a few become IGNORED,
# and neighbouring rows keep unequally many. Code that does not know IGNORED might take it for an
# index: there labels stay as they are, and the proof waits for rows that differ by themselves.


#: One more way, besides ``WAYS``: the loss is computed once for all rows, from what the model's
#: children have returned for the micro-batches.
ONCE = "once"

#: For each dtype of a model's weights, two relative differences: losses count as equal up to the
#: first difference, and as unequal above the second.
CLOSE = {torch.float64: (1e-9, 1e-7), torch.float32: (1e-5, 1e-4)}
#: The differences as in ``CLOSE`` for other models: ``HALF`` in half precision or under autocast,
#: ``OTHERS`` in higher precision on accelerators.
HALF = 4e-3, 3e-2
OTHERS = 1e-4, 1e-3


class Weighing:
    """The ways in which the losses of a wrapper's model weigh their rows, once these are known.

    Args:
        pipe: the wrapper.
    """

    def __init__(self, pipe: MappedGPipe) -> None:
        self._pipe = ref(pipe)
        #: For the set of names of a call's arguments, the ways of weighing rows that fit in the
        #: last proof for such a call. The first of these ways is used.
        self._ways: dict[frozenset[str], list[str]] = {}
        #: The calls of the model's children whose outputs are kept in each step, to compute the
        #: loss of all rows from them; empty if no way is ``ONCE``.
        self.by_rows: ByRows = {}

    @property
    def pipe(self) -> MappedGPipe:
        """The wrapper."""
        pipe = self._pipe()
        assert pipe is not None
        return pipe

    def way(self, kwargs: Mapping[str, Any]) -> str:
        """The way for a mini-batch, by the keyword arguments of the model."""
        ways = self._ways.get(call_key(kwargs))
        return ways[0] if ways else usual_way(self.pipe.module, kwargs)

    def prove(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[Mapping[str, Any]],
        rows: int,
        names: Sequence[str],
        *,
        strict: bool,
    ) -> None:
        """Find out how the model's loss weighs its rows, unless that is known.

        Args:
            args: the positional arguments of the model.
            kwargs: its keyword arguments.
            parts: where rows cannot be cut, the arguments of two micro-batches together, and then
                of each; else empty.
            rows: the number of rows, which counts only if ``parts`` is empty.
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
        if not parts:
            ones = [1] * rows
            kwargs = differing(model, kwargs, names)
            ways = [x for x in before or WAYS if x != "sum"]
            counts = [counts_by(x, model, kwargs, names, ones).cpu() for x in ways]
            apart = told_apart(torch.stack(counts))
            differ = classes_differ(kwargs, names, rows)
            k = int((2 * apart + differ).argmax())
            if before and not apart[k]:
                return
            # Two rows of one class do not show whether the loss weighs classes: wait for others.
            is_open = has_classes(kwargs, names) and not is_of_library(model)
            if is_open and not differ[k]:
                return
            sizes = [size for size in (k, 2, rows - 2 - k) if size]
            both = [*FlatInput((args, kwargs)).split(Division(sizes))][k > 0]
            pairs = [both, *FlatInput(both).split(Division([1, 1]))]
        else:
            pairs = [(args, {**part}) for part in parts]
            pairs[0][1].pop(KEY, None)
        fitting = self._compared(pairs, names, usual_way(model, kwargs), strict)
        lists = [x for x in kwargs.values() if type(x) is list]
        if before is None and is_of_library(model) and not lists:
            # ``differing`` made rows that tell ways apart: the first that fits needs no more proof.
            del fitting[1:]
        if fitting:
            self._ways[key] = fitting

    def _compared(
        self, pairs: list[Any], names: Sequence[str], usual: str, strict: bool
    ) -> list[str]:
        """Compute two rows, or micro-batches, and find the ways that give the loss of both."""
        # ``forward`` is called past the wrapper's hooks, which users set for their training steps.
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
                        # A model that fails here proves nothing: the usual way stays.
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
                (target, extra), *separate = [output for output, _ in outputs]
                if target is None or not target.isfinite():
                    return [usual] if target is None else []
                losses = torch.stack([loss for loss, _ in separate]).cpu().double()
                # What routers add to the loss of two rows should be the mean of what they add to
                # each. ``slack`` is by how much it is not, and the loss may be off by as much.
                others = zip(extra.values(), *[parts.values() for _, parts in separate])
                slack = sum(float((x - sum(parts) / len(parts)).abs()) for x, *parts in others)
                tight, near = [x * max(1.0, float(target.abs())) + slack for x in closeness(model)]
                off = {
                    way: float((self._weighed(way, losses, pairs, names) - target.cpu()).abs())
                    for way in WAYS
                }
                off = {way: float("inf") if x != x else x for way, x in off.items()}
                ways = [usual, *sorted({*WAYS} - {usual}, key=off.__getitem__)]
                # A way that is not the usual one is taken if it fits best, but not "objects". In a
                # model before training, parts of a loss that count no objects are nearly equal in
                # all rows. They fit any weights then, and after training would be off.
                best = min((x for x in ways if x != "objects"), key=off.__getitem__)
                for way in (usual, best):
                    if off[way] <= tight:
                        return [way, *(x for x in ways if x != way and off[x] <= tight)]
                calls = [calls for _, calls in outputs]
                # ValueError: outputs of different lengths cannot be joined, so ONCE does not fit.
                with suppress(ValueError):
                    if kept := rows_of_calls(calls[0], calls[1:], model):
                        sizes = [rows_in(part, names) for _, part in pairs[1:]]
                        children = joined_calls(kept, calls[1:], sizes)
                        once = losses_in(repeated(pipe, pairs[0][0], pairs[0][1], children))[0]
                        if once is not None and 4 * (once - target).abs() <= min(
                            off[best], 4 * near
                        ):
                            self.by_rows = kept
                            return [ONCE]
                if off[best] <= near:
                    return [usual if off[usual] <= 4 * off[best] else best]
                with recorded(model, reduce=losses_in):
                    twice = [*run(call, model, pairs[:1]), *run(call, model, pairs[:1])]
                # If random numbers change the loss of the same rows, a difference proves no error.
                if strict and all((x - target).abs() <= near for (x, _), _ in twice):
                    weighed = float(self._weighed(usual, losses, pairs, names))
                    raise ValueError(
                        "the loss of a mini-batch must follow from those of its micro-batches, "
                        "weighed by labels, tokens or rows, or from what the model's children "
                        f"return for its rows ({type(base_of(model)).__name__}: "
                        f"{float(target):.6g} for two rows together, {weighed:.6g} for each alone, "
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
        counts = [counts_by(way, model, x, names, [rows_in(x, names)]) for _, x in pairs[1:]]
        total = torch.cat(counts).cpu()
        return whole(losses, torch.ones(rows) if way == "sum" else shares_of(total))


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
    outputs: list[Any] = call(*args, **Chunks.of([{**defaults, **kwargs} for _, kwargs in parts]))
    return outputs


def losses_in(output: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The loss in an output of a model, and what routers have added to it."""
    loss, extra = output, dict[str, Tensor]()
    if isinstance(output, Mapping):
        added = ("aux_loss", "z_loss")
        tensors = {key: x for key, x in output.items() if isinstance(x, Tensor)}
        extra = {key: x for key, x in tensors.items() if key.endswith(added)}
        loss = output.get("loss")
    elif isinstance(output, tuple) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(()), extra
    return None, extra


def joined_calls(
    by_rows: ByRows, separate: Sequence[Mapping[str, list[Any]]], sizes: list[int]
) -> dict[str, list[Any]]:
    """Join what children have returned for micro-batches."""
    rows = Division(sizes)
    return {
        name: [
            joined([Batch(x) for x in outputs], rows) if keep else None
            for keep, *outputs in zip(calls, *[part[name] for part in separate])
        ]
        for name, calls in by_rows.items()
    }


def rows_in(kwargs: Mapping[str, Any], names: Sequence[str]) -> int:
    """The number of rows of a micro-batch, by its labels if it has any."""
    # Labels come first: other tensors may have a row for each patch of an image.
    return row_count([kwargs.get(name) for name in names]) or row_count({**kwargs})


def told_apart(counts: Tensor) -> Tensor:
    """Count, for each two neighbouring rows, the ways of weighing that they tell apart.

    Args:
        counts: the count of each row in each way, of shape ``(ways, rows)``.
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
    """Whether neighbouring rows have different classes, of shape ``(rows - 1,)``."""
    labels = [x for x in map(kwargs.get, names) if isinstance(x, Tensor) and is_class(x)]
    differ = [x[:-1] != x[1:] for x in labels if len(x) == rows]
    return torch.stack(differ).any(0).long().cpu() if differ else torch.zeros(rows - 1).long()


def closeness(model: nn.Module) -> tuple[float, float]:
    """Two limits: losses differ by rounding up to the first, and are others from the second on."""
    kinds = {x.dtype for x in model.parameters() if x.is_floating_point()}
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu") or not kinds <= {*CLOSE}:
        return HALF
    limits = CLOSE[torch.float64 if kinds == {torch.float64} else torch.float32]
    # An accelerator's kernels depend on shapes, and some round their inputs: so limits are wider.
    on_cpu = all(x.device.type == "cpu" for x in model.parameters())
    return limits if on_cpu else OTHERS


def is_of_library(model: nn.Module) -> bool:
    """Whether the class of a model is of Transformers, and not of a user."""
    return type(base_of(model)).__module__.startswith("transformers.")


def differing(model: nn.Module, kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Have the labels of rows differ in number, if the model's code knows :data:`IGNORED`."""
    code = getattr(inspect.unwrap(type(base_of(model)).forward), "__code__", None)
    used = code.co_names if code is not None and is_of_library(model) else ()
    changed = {**kwargs}
    for name in names:
        x = kwargs.get(name)
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool:
            continue
        odd = torch.arange(len(x), device=x.device) % 2
        knows = "loss_function" in used or "CrossEntropyLoss" in used
        # Models with start_n_top index outputs by an answer's position, so it must stay in the row.
        takes = hasattr(base_of(model).config, "start_n_top") if knows else True
        if x.dim() == 2 and (knows or bool((x == IGNORED).any())):
            # Even rows keep two labels, odd rows eight: few, to see if the first of a row counts.
            most = (2 + 6 * odd).unsqueeze(1)
            changed[name] = x.masked_fill((x != IGNORED).cumsum(1) > most, IGNORED)
        ids = kwargs.get("input_ids")
        if name.endswith("_positions") and not takes and isinstance(ids, Tensor):
            # In odd rows the answer's end is moved beyond the row, so that the loss ignores it.
            length = ids.shape[1]
            changed[name] = x % length if name[0] == "s" else torch.where(odd.bool(), length, x)
    return changed


#: For each wrapper, what proofs have found out about the loss of its model.
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
