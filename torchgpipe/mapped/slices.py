"""Slices of long sequences as micro-batches.

One sequence has no rows to divide among devices. But a causal model computes a slice of it from the
slice itself and from the keys and values of earlier ones, so that slices follow each other through
the devices as micro-batches do, and their gradients are those of the whole sequence. Sources:
TeraPipe (Li et al., arXiv 2102.07988) and Seq1F1B (Sun et al., arXiv 2406.03488), which divide the
sequence of models of their own.

What a call of the model gets for the whole sequence is divided here: a slice gets its positions of
all tensors that have the sequence in dimension 1, the padding mask as far as its own end, and the
labels of the token behind each of its own. Its losses are weighed such that their mean is that of
the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.engine.wrapper import Wrapper
from torchgpipe.mapped.on_demand import can_fill_itself, on_reading, there
from torchgpipe.mapped.slice_cache import Layers
from torchgpipe.mapped.slice_lengths import Slices, checked_slices, lengths_of
from torchgpipe.mapped.slice_proof import TOKENS, prove
from torchgpipe.values.division import division_of, split
from torchgpipe.values.marks import Chunks
from torchgpipe.values.structure import Arguments, flatten_tree

__all__: list[str] = []

#: The names of arguments of which one has the sequence.
SEQUENCES = ("input_ids", "inputs_embeds")

#: The names of the argument for the cache.
CACHES = ("cache", "past_key_values", "layer_past")

#: The names of arguments that say where packed sequences begin.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")

#: The label that counts for nothing.
IGNORED = -100


class Slicing:
    """The slices of a wrapper's calls.

    Args:
        slices: the number of slices, or their lengths.

    Raises:
        TypeError, ValueError: it is neither.
    """

    def __init__(self, slices: Any) -> None:
        self.slices = checked_slices(slices)
        #: Whether a few tokens have shown that the model can be computed in slices.
        self._is_proven = False

    def call(
        self, wrapper: Wrapper, model: nn.Module, forward: Callable[..., Any], given: Arguments
    ) -> Any:
        """Compute a call of a wrapper in slices.

        Args:
            wrapper: the wrapper.
            model: its model.
            forward: computes keyword arguments of the model, micro-batch by micro-batch.
            given: the arguments of the call.
        """
        call = SlicedCall(model, self.slices, wrapper._width, wrapper.chunks, given)
        if torch.is_grad_enabled() and wrapper.training and not self._is_proven:
            few = call.few(TOKENS)
            # What warns of few micro-batches looks at whether the wrapper trains.
            wrapper.training = False
            try:
                prove(
                    model,
                    lambda: forward(**few, use_cache=False),
                    lambda: SlicedCall(model, 2, 1, 1, Arguments((), few)).computed(forward),
                )
            finally:
                wrapper.training = True
            self._is_proven = True
        return call.computed(forward)


class SlicedCall:
    """A call of a model for sequences that are divided into slices.

    Args:
        model: the model.
        slices: the number of slices, or their lengths.
        devices: the number of devices.
        chunks: the number of micro-batches that rows are divided into.
        given: the arguments of the call.

    Raises:
        ValueError: the model cannot be computed in slices, or not with these arguments.
    """

    def __init__(
        self, model: nn.Module, slices: Slices, devices: int, chunks: int, given: Arguments
    ) -> None:
        self._model = model
        signature = inspect.signature(model.forward)
        bound = signature.bind(*given.args, **given.kwargs).arguments
        for name, x in signature.parameters.items():
            if x.kind is x.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        self._name = next((x for x in SEQUENCES if bound.get(x) is not None), "")
        self._cache = self._verified(bound)
        division = division_of(bound, chunks)
        #: Whether the caller has divided the rows, and gets the outputs as they are.
        self._is_ready = division.is_ready
        parts = [*split(bound, division)]
        self._first = parts[0]
        #: Of each micro-batch, the number of rows and the lengths of its slices.
        self._sizes: list[tuple[int, list[int]]] = []
        self._layers: list[Layers] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            rows, length = part[self._name].shape[:2]
            lengths = lengths_of(slices, length, devices, model)
            self._sizes.append((rows, lengths))
            self._layers.append(Layers(model, lengths))
            calls += self._slices(part, lengths, self._layers[-1])
        #: The arguments of all slices.
        self.kwargs = Chunks.of(calls)

    def _verified(self, given: Mapping[str, Any]) -> str:
        """The name of the argument for the cache."""
        kind, config = type(self._model).__name__, getattr(self._model, "config", None)
        base: Any = getattr(self._model, "get_base_model", lambda: self._model)()
        takes = inspect.signature(base.forward).parameters
        cache = next((x for x in CACHES if x in takes), None)
        adapters: Any = getattr(self._model, "peft_config", {})
        if (
            cache is None
            or config is None
            or getattr(config, "is_encoder_decoder", False)
            or any(x.is_prompt_learning for x in adapters.values())
        ):
            raise ValueError(
                "slices of a sequence are for causal models of Transformers, which take a cache of "
                "keys and values, and without prompts that are learned "
                f"(model: {kind}, arguments: {[*takes]}); use slices=1"
            )
        if not self._name:
            raise ValueError(
                "slices divide the sequence that a model is called with by name "
                f"(names: {[*SEQUENCES]}, arguments: {[*given]}); pass it by name, or use slices=1"
            )
        if given.get(cache) is not None or given.get("use_cache"):
            raise ValueError(
                "a model that computes slices gets its cache from the wrapper "
                f"(arguments: {cache}, use_cache); leave them away, or set slices = 1 to write text"
            )
        if given.get("labels") is not None and all(x.kind != x.VAR_KEYWORD for x in takes.values()):
            raise ValueError(
                "the loss of a slice needs the label behind its last token, as shift_labels, which "
                f"this model does not take (model: {kind}); compute the loss from its logits"
            )
        dropping = [
            name
            for name, x in self._model.named_modules()
            if getattr(x, "gradient_checkpointing", False) and x.training
        ]
        if dropping:
            raise ValueError(
                "gradient checkpoints of Transformers drop the cache that slices need "
                f"(modules: {dropping[:3]}); call model.gradient_checkpointing_disable(), and use "
                "checkpoint='always' of the wrapper"
            )
        return cache

    def _slices(
        self, given: Mapping[str, Any], lengths: Sequence[int], layers: Layers
    ) -> Iterator[dict[str, Any]]:
        """The arguments of each slice of a micro-batch."""
        rows, length = given[self._name].shape[:2]
        whole = {**given, "use_cache": True}
        if whole.get("labels") is not None:
            if whole["labels"].shape != (rows, length):
                raise ValueError(
                    "the loss of a slice needs a label for each token (labels: "
                    f"{tuple(whole['labels'].shape)}, tokens: {(rows, length)}); use slices=1"
                )
            whole.setdefault(
                "shift_labels", nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
            )
            count = whole.get("num_items_in_batch")
            if count is None:
                count = (whole["shift_labels"] != IGNORED).sum()
            # The mean of the slices' losses is the loss then, and that of what else they count.
            whole["num_items_in_batch"] = count / len(lengths)
        mask = whole.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == (rows, length):
            self._verify_padding(mask)
            if mask.all():
                # Attention is faster without it, and experts count the tokens of a mask.
                whole["attention_mask"] = None
        elif mask is None:
            self._verify_unpacked(whole)
        for k, (start, size) in enumerate(zip(accumulate(lengths, initial=0), lengths)):
            yield {
                name: _slice(name, x, start, start + size, (rows, length))
                for name, x in whole.items()
            } | {self._cache: layers.of_slice(k)}

    def _verify_padding(self, mask: Tensor) -> None:
        if not mask[:, 0].all():
            raise ValueError(
                "sequences that are divided into slices are padded on the right (rows that begin "
                f"with padding: {(mask[:, 0] == 0).nonzero().flatten().tolist()}); set "
                "tokenizer.padding_side = 'right'"
            )
        if getattr(self._model.config, "output_router_logits", False) and not mask.all():
            raise ValueError(
                "the balance of experts counts tokens, of which a slice knows its own, and its "
                "mask those before it, too (config.output_router_logits: True, "
                "attention_mask: with padding); pass rows of one length, or use slices=1"
            )

    def _verify_unpacked(self, given: Mapping[str, Any]) -> None:
        """Check that a row has one sequence: beside a cache, models look for no others in it."""
        positions, starts = given.get("position_ids"), []
        if isinstance(positions, Tensor) and positions.dim() == 2:
            starts = (positions.diff() != 1).any(0).nonzero().flatten().add(1).tolist()
        named = [x for x in PACKED if given.get(x) is not None]
        if starts or named:
            raise ValueError(
                "a row that is divided into slices has one sequence, and none that are packed "
                f"(positions that do not follow the one before: {starts[:3]}, arguments: {named}); "
                "use slices=1, or rows of their own"
            )

    def few(self, count: int) -> dict[str, Any]:
        """The arguments for the first tokens of one sequence, all of them with a label.

        Args:
            count: the number of tokens.
        """
        sizes = self._first[self._name].shape[:2]
        found = {
            name: _slice(name, x, 0, min(count, sizes[1]), sizes)
            for name, x in self._first.items()
            if name not in ("shift_labels", "num_items_in_batch")
        }
        found = {
            name: x[:1] if isinstance(x, Tensor) and x.shape[:1] == sizes[:1] else x
            for name, x in found.items()
        }
        if found.get("labels") is not None:
            found["labels"] = found.get("input_ids", found["labels"].clamp(min=0))
        return found

    def computed(self, forward: Callable[..., Any]) -> Any:
        """Compute all slices, and join their outputs."""
        try:
            outputs = forward(**self.kwargs)
        finally:
            for layers in self._layers:
                layers.let_go()
        return self.joined(outputs)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all slices: tensors along positions and rows, losses by micro-batch.

        Raises:
            ValueError: a tensor has its positions in another dimension than 1.
        """
        if not self._is_ready:
            return joined(outputs, self._sizes)
        rest = iter(outputs)
        return [joined([next(rest) for _ in x[1]], x) for x in self._sizes]


#: Of a micro-batch, the number of rows and the lengths of its slices.
Size: TypeAlias = tuple[int, Sequence[int]]


def joined(outputs: Sequence[Any], sizes: Sequence[Size] | Size) -> Any:
    """Join outputs of slices.

    Args:
        outputs: the outputs, micro-batch by micro-batch.
        sizes: the sizes of the micro-batches, whose losses are stacked; or that of the only one.
    """
    if not can_fill_itself(outputs[0]):
        return _joined([*outputs], sizes)
    values = [there(x) for x in outputs]
    found = {
        name: _joined([x[name] for x in values], sizes)
        for name, x in values[0].items()
        if not (isinstance(x, Tensor) and x.dim())
    }

    def make() -> dict[str, Any]:
        names = [name for name in outputs[0] if name not in found]
        return {name: _joined([x[name] for x in outputs], sizes) for name in names}

    return on_reading(outputs[0], found, make)


def _joined(values: list[Any], sizes: Sequence[Size] | Size) -> Any:
    columns = [flatten_tree(x) for x in values]
    leaves = [_joined_leaf(column, sizes) for column in zip(*[x for x, _ in columns])]
    return columns[0][1].unflatten(leaves)


def _joined_leaf(column: Sequence[Any], sizes: Sequence[Size] | Size) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    if isinstance(sizes, tuple):
        return _joined_slices([*column], *sizes)
    rest = iter(column)
    parts = [_joined_slices([next(rest) for _ in x[1]], *x) for x in sizes]
    if parts[0].dim():
        return torch.cat(parts)
    return torch.stack(parts)


def _joined_slices(parts: list[Tensor], rows: int, lengths: Sequence[int]) -> Tensor:
    if not parts[0].dim():
        return torch.stack(parts).mean(0)
    if rows > 1 and all(x.shape[0] == rows * size for x, size in zip(parts, lengths)):
        # As routers have them.
        return torch.cat([x.unflatten(0, (rows, -1)) for x in parts], 1).flatten(0, 1)
    if any(x.shape[:2] != (rows, size) for x, size in zip(parts, lengths)):
        raise ValueError(
            "outputs of slices have rows in dimension 0 and positions in dimension 1, by which "
            f"they are joined (shapes: {[tuple(x.shape) for x in parts]}, rows: {rows}, "
            f"lengths of slices: {[*lengths]}); use slices=1 to get this output"
        )
    return torch.cat(parts, 1)


def _slice(name: str, value: Any, start: int, end: int, sizes: tuple[int, int]) -> Any:
    """What a slice gets of an argument.

    Args:
        name: the name of the argument.
        value: its value for the whole sequence.
        start: the first position of the slice.
        end: the position behind its last one.
        sizes: the number of rows, and the length of the sequence.
    """
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if name == "attention_mask" and value.shape == sizes:
        return value[:, :end]
    if name == "attention_mask" and value.dim() == 4:
        return value[..., start:end, :end]
    if value.shape[1] == sizes[1] and value.shape[0] in (1, sizes[0]):
        # Models look at it as one row.
        return value[:, start:end].contiguous()
    return value
