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
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.hugging_face import IGNORED
from torchgpipe.mapped.slice_cache import KeptLayers, cache_class
from torchgpipe.mapped.slice_lengths import Slices, checked_slices, lengths_of
from torchgpipe.mapped.slice_outputs import Extent, joined
from torchgpipe.mapped.slice_proof import TOKENS, prove
from torchgpipe.mapped.slice_refusals import (
    SEQUENCES,
    verified,
    verify_mask,
    verify_padding,
    verify_part,
)
from torchgpipe.values.division import FlatInput
from torchgpipe.values.marks import Chunks, NoChunk
from torchgpipe.values.structure import Arguments

__all__: list[str] = []

#: Arguments that say where each text of a packed row begins, which ``_texts()`` refuses.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class SliceNumber(int):
    """The number of a slice among all of a mini-batch.

    It is shown as ``i.k``, slice ``k`` of micro-batch ``i``, wherever a micro-batch has its number.
    """

    name: str

    def __str__(self) -> str:
        return self.name


class Slicing:
    """The slices of a wrapper's calls.

    Args:
        slices: the number of slices, or their lengths.

    Raises:
        TypeError, ValueError: it is neither.
    """

    def __init__(self, slices: Any) -> None:
        self.slices = checked_slices(slices)
        #: Whether ``prove()`` has shown, by a few tokens, that slices compute what the model does.
        self._is_proven = False
        #: In a call, the :class:`SliceNumber` that ``number()`` returns for each slice; else empty.
        self._numbers: Sequence[int] = ()
        #: The lengths in tokens of the slices of the first micro-batch, in the latest call.
        self.lengths: Sequence[int] = ()

    def number(self, i: int) -> int:
        """The number of micro-batch ``i``, or of slice ``i`` among all."""
        return self._numbers[i] if self._numbers else i

    @property
    def count(self) -> int:
        """The number of slices of the last call's first sequence."""
        return 1 if self.slices == 1 else len(self.lengths)

    @property
    def words(self) -> str | None:
        """The slices in words; None for the whole sequence."""
        if self.slices == 1:
            return None
        lengths = f" ({', '.join(map(str, self.lengths))} tokens)" if self.lengths else ""
        return f"{self.slices if isinstance(self.slices, int | str) else len(self.slices)}{lengths}"

    def call(self, wrapper: Any, forward: Callable[..., Any], arguments: Arguments) -> Any:
        """Compute a call of a wrapper in slices.

        Args:
            wrapper: the wrapper.
            forward: computes keyword arguments of the model, micro-batch by micro-batch.
            arguments: the arguments of the call.
        """
        if wrapper.threads > 1:
            raise ValueError(
                "slices of a sequence follow each other, so one thread computes them (threads: "
                f"{wrapper.threads}, slices: {self.slices}); use threads=1"
            )
        model = wrapper.module
        call = SlicedCall(model, self.slices, wrapper._width, wrapper.chunks, arguments)
        if torch.is_grad_enabled() and wrapper.training and not self._is_proven and call.is_divided:
            few = call.few(TOKENS)
            # The proof is no step of the user's. Without training mode nothing warns of few
            # micro-batches, and without a recording no trace shows the proof.
            wrapper.training, lasting = False, wrapper._lasting
            recording, lasting.recording = lasting.recording, None
            try:
                prove(
                    model,
                    lambda **changed: forward(**{**few, "use_cache": False, **changed}),
                    lambda: SlicedCall(model, 2, 1, 1, Arguments((), few)).computed(forward),
                    {call.sequence: few[call.sequence]},
                )
            finally:
                wrapper.training, lasting.recording = True, recording
            self._is_proven = True
        self._numbers, self.lengths = call.numbers, call.lengths
        try:
            return call.computed(forward)
        finally:
            self._numbers = ()


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
        self, model: nn.Module, slices: Slices, devices: int, chunks: int, arguments: Arguments
    ) -> None:
        self._model = model
        signature = inspect.signature(model.forward)
        bound = signature.bind(*arguments.args, **arguments.kwargs).arguments
        for name, x in signature.parameters.items():
            if x.kind is x.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        #: The name of the argument that has the sequence.
        self.sequence = next((x for x in SEQUENCES if bound.get(x) is not None), "")
        self._cache = verified(model, bound, self.sequence)
        flat = FlatInput(bound)
        division = flat.division(chunks)
        #: Whether the caller has divided rows into micro-batches, and so gets a list of outputs.
        self._is_ready = division.is_ready
        parts = [*flat.split(division)]
        self._first = parts[0]
        #: The number of tokens at the end of a row that have no output. Fused heads of TRL that get
        #: labels which are not shifted leave out the last token, which has no label behind it.
        self._left_out = int(bool(bound.get("fused_lm_head")) and bound.get("shift_labels") is None)
        #: For each micro-batch: the number of rows, and the lengths of its slices.
        self._sizes: list[Extent] = []
        self._layers: list[KeptLayers] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            verify_part(type(model).__name__, part, self.sequence, self._cache)
            rows, length = part[self.sequence].shape[:2]
            lengths = lengths_of(slices, length, devices, model)
            self._sizes.append((rows, lengths))
            self._layers.append(KeptLayers(model, lengths))
            calls += self._slices(part, lengths, self._layers[-1])
        self.kwargs = Chunks.of(calls)

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths of the slices of the first micro-batch."""
        return self._sizes[0][1]

    @property
    def numbers(self) -> list[int]:
        """The numbers of all slices."""
        names = [f"{i}.{k}" for i, (_, x) in enumerate(self._sizes) for k in range(len(x))]
        numbers = [SliceNumber(k) for k in range(len(names))]
        for number, name in zip(numbers, names):
            number.name = name
        return [*numbers]

    @property
    def is_divided(self) -> bool:
        """Whether sequences have more than one token."""
        return sum(self.lengths) > 1

    def _slices(
        self, arguments: Mapping[str, Any], lengths: Sequence[int], layers: KeptLayers
    ) -> Iterator[dict[str, Any]]:
        """The arguments of each slice of a micro-batch."""
        rows, length = arguments[self.sequence].shape[:2]
        whole = {**arguments, "use_cache": True}
        if whole.get("labels") is not None:
            whole.setdefault(
                "shift_labels", nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
            )
        if whole.get("shift_labels") is not None:
            count = whole.get("num_items_in_batch")
            if count is None:
                count = (whole["shift_labels"] != IGNORED).sum()
            # The model divides each slice's sum of losses by this number, so that the mean of the
            # slices' losses is the loss of the sequence.
            whole["num_items_in_batch"] = count / len(lengths)
        mask = whole.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == (rows, length):
            verify_padding(self._model.config, mask)
            if mask.all():
                # Attention is faster without a mask, and losses of experts would fail: a slice's
                # mask begins with the sequence, and so is longer than the slice.
                whole["attention_mask"] = None
        elif isinstance(mask, Tensor) and mask.dim() == 4:
            verify_mask(mask, lengths, layers.has_windows)
        elif mask is not None:
            raise ValueError(
                "slices divide a mask of padding, or one of four dimensions (attention_mask: "
                f"{type(mask).__name__}, shape: {[*getattr(mask, 'shape', ())]}, sequence: "
                f"{(rows, length)}); pass such a mask, or use slices=1"
            )
        texts = self._texts(whole, layers) if mask is None else None
        for k, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
            part = {name: _slice(name, x, start, end, (rows, length)) for name, x in whole.items()}
            if texts is not None:
                part["attention_mask"] = _same_text(texts, start, end)
            yield part | {self._cache: layers.of_slice(k)}

    def _texts(self, arguments: Mapping[str, Any], layers: KeptLayers) -> Tensor | None:
        """The number of each token's text, where a row has several, and positions tell.

        Where positions begin again another text begins, which sees nothing of the one before.
        Models find out for themselves, but not beside a cache.
        """
        positions, texts = arguments.get("position_ids"), None
        named = [x for x in PACKED if arguments.get(x) is not None]
        if isinstance(positions, Tensor) and positions.dim() == 2:
            begins = positions.diff(dim=1) != 1
            if begins.any():
                texts = nn.functional.pad(begins.cumsum(1), (1, 0))
        attention = getattr(self._model.config, "_attn_implementation", None)
        if named or (texts is not None and (attention != "sdpa" or layers.has_windows)):
            raise ValueError(
                "a row of several texts is divided into slices by a mask, which "
                "attn_implementation='sdpa' takes, and no layer with a sliding window "
                f"(attn_implementation: {attention}, windows: {layers.has_windows}, arguments: "
                f"{named}); pass position_ids alone to such a model, a row for each text, or use "
                "slices=1"
            )
        return texts

    def few(self, count: int) -> dict[str, Any]:
        """The arguments for the first tokens of one sequence, of which the second half has labels.

        So one label is that of the first slice, and what this has in the cache counts.

        Args:
            count: the number of tokens.
        """
        sizes = self._first[self.sequence].shape[:2]
        arguments = {**self._first}
        arguments.pop("num_items_in_batch", None)
        if arguments.get("labels") is not None:
            arguments.pop("shift_labels", None)
        end = min(count, sizes[1])
        first_tokens = {name: _slice(name, x, 0, end, sizes) for name, x in arguments.items()}
        first_tokens = {name: _first_row(name, x, sizes[0]) for name, x in first_tokens.items()}
        if getattr(self._model.config, "output_router_logits", False):
            # No loss for the balance of experts: slices have another balance than the whole.
            first_tokens["output_router_logits"] = False
        for name in ("labels", "shift_labels"):
            if first_tokens.get(name) is not None:
                labels = first_tokens.get("input_ids", first_tokens[name].clamp(min=0)).clone()
                labels[:, : labels.shape[1] // 2] = IGNORED
                first_tokens[name] = labels
        return first_tokens

    def computed(self, forward: Callable[..., Any]) -> Any:
        """Compute all slices, and join their outputs."""
        try:
            outputs = forward(**self.kwargs)
        finally:
            for layers in self._layers:
                layers.let_go()
        if type(outputs[0]) is tuple:
            kind = cache_class()
            outputs = [tuple(x for x in output if not isinstance(x, kind)) for output in outputs]
        return self.joined(outputs)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all slices: tensors along positions and rows, losses by micro-batch.

        Raises:
            ValueError: a tensor has its positions in another dimension than 1.
        """
        if not self._is_ready:
            return joined(outputs, self._sizes, self._left_out)
        rest = iter(outputs)
        return [joined([next(rest) for _ in x[1]], x, self._left_out) for x in self._sizes]


def _slice(name: str, value: Any, start: int, end: int, sizes: tuple[int, int]) -> Any:
    """Take the part of an argument that a slice gets.

    Args:
        name: the name of the argument.
        value: its value for the whole sequence.
        start: the first position of the slice.
        end: the position behind its last one.
        sizes: the number of rows, and the length of the sequence.
    """
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if name.startswith("encoder_"):
        # Every token of the slice looks at all states of an encoder.
        return value
    if name == "attention_mask" and value.shape == sizes:
        return value[:, :end]
    if name == "attention_mask" and value.dim() == 4:
        return value[..., start:end, :end]
    if name == "position_ids":
        # Some models have kinds of positions in dimension 0: the sequence is the last dimension.
        return value[..., start:end]
    if value.shape[1] == sizes[1] and value.shape[0] in (1, sizes[0]):
        # Contiguous, since models flatten labels by view(-1).
        return value[:, start:end].contiguous()
    return value


def _same_text(texts: Tensor, start: int, end: int) -> Tensor:
    """The mask of a slice of several texts, of shape ``(rows, 1, tokens, tokens so far)``."""
    seen = torch.ones(end - start, end, dtype=torch.bool, device=texts.device).tril(start)
    return (texts[:, None, start:end, None] == texts[:, None, None, :end]) & seen


def _first_row(name: str, value: Any, rows: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if name == "position_ids" and value.dim() > 1:
        row = value[..., :1, :]
    else:
        row = value[:1] if value.shape[0] == rows else value
    return row if row.shape[0] == 1 else NoChunk(row)
