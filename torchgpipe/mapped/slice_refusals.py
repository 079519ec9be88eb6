"""Refusals of slices: models that cannot be computed so, and arguments of calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.hugging_face import base_of

__all__: list[str] = []

#: The names that a model's argument with the sequence may have.
SEQUENCES = ("input_ids", "inputs_embeds")

#: The names that a model's argument for the cache of keys and values may have.
CACHES = ("cache", "past_key_values", "layer_past")

#: The beginnings of the names of arguments with images or sounds, which ``verify_part()`` refuses.
MEDIA = ("pixel_values", "image_", "video_", "audio_", "input_features", "input_values")


def verified(model: nn.Module, arguments: Mapping[str, Any], sequence: str) -> str:
    """Check that a model can be called in slices.

    Args:
        model: the model.
        arguments: the arguments of the call.
        sequence: the name of the argument that has the sequence; empty if there is none.

    Returns:
        The name of the argument for the cache.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    takes = inspect.signature(base_of(model).forward).parameters
    cache = next((x for x in CACHES if x in takes), None)
    adapters: Any = getattr(model, "peft_config", {})
    method = vars(base_of(model)).get("forward")
    if cache is None and method is not None:
        raise ValueError(
            "slices of a sequence need a forward that takes a cache of keys and values by name, "
            f"and that of the model was replaced by another (model: {kind}, forward: "
            f"{getattr(method, '__qualname__', type(method).__name__)}, arguments: {[*takes]}); "
            "use slices=1"
        )
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
    if not sequence:
        raise ValueError(
            "slices divide the sequence that a model is called with by name "
            f"(names: {[*SEQUENCES]}, arguments: {[*arguments]}); pass it by name, or use slices=1"
        )
    if arguments.get("labels") is not None and all(x.kind != x.VAR_KEYWORD for x in takes.values()):
        raise ValueError(
            "the loss of a slice needs the label behind its last token, as shift_labels, which "
            f"this model does not take (model: {kind}); compute the loss from its logits"
        )
    dropping = [
        name
        for name, x in model.named_modules()
        if getattr(x, "gradient_checkpointing", False) and x.training
    ]
    if dropping:
        raise ValueError(
            "gradient checkpoints of Transformers drop the cache that slices need "
            f"(modules: {dropping[:3]}); call model.gradient_checkpointing_disable(), or pass "
            "gradient_checkpointing=False to a Trainer's arguments, and use "
            "checkpoint='always' of the wrapper"
        )
    return cache


def verify_part(kind: str, arguments: Mapping[str, Any], name: str, cache: str) -> None:
    """Check the arguments of a micro-batch, whose sequence and cache have these names."""
    sequence = arguments[name]
    if not isinstance(sequence, Tensor) or sequence.dim() < 2 or not sequence.shape[1]:
        raise ValueError(
            "slices divide a tensor of rows and positions, one at least "
            f"({name}: {type(sequence).__name__}, shape: "
            f"{[*getattr(sequence, 'shape', ())]}); pass such a tensor"
        )
    if arguments.get(cache) is not None or arguments.get("use_cache"):
        raise ValueError(
            "a model that computes slices gets its cache from the wrapper "
            f"(arguments: {cache}, use_cache); leave them away, or set slices = 1 to write text"
        )
    if isinstance(arguments.get("logits_to_keep"), Tensor) or arguments.get("logits_to_keep"):
        raise ValueError(
            "logits_to_keep counts tokens from the end of the sequence, and each slice would "
            "count from its own (logits_to_keep: "
            f"{arguments['logits_to_keep']}); leave it away, or use slices=1, as for GRPO and RLOO"
        )
    if isinstance(arguments.get("labels"), Tensor) and arguments["labels"].dim() < 2:
        raise ValueError(
            "a loss of whole sequences cannot be computed in slices (model: "
            f"{kind}, shape of labels: {tuple(arguments['labels'].shape)}); use slices=1"
        )
    media = [x for x in arguments if x.startswith(MEDIA) and arguments[x] is not None]
    if media:
        raise ValueError(
            "slices are for text, since a slice does not know which of its tokens belong to "
            f"which image or sound (model: {kind}, arguments: {media}); pass inputs_embeds "
            "that have them, or use slices=1"
        )


def verify_padding(config: Any, mask: Tensor) -> None:
    """Check that rows are padded on the right."""
    if not mask[:, 0].all():
        raise ValueError(
            "sequences that are divided into slices are padded on the right (rows that begin "
            f"with padding: {(mask[:, 0] == 0).nonzero().flatten().tolist()}); set "
            "tokenizer.padding_side = 'right', or use slices=1 where prompts are to end "
            "together, as for GRPO and RLOO"
        )
    if getattr(config, "output_router_logits", False) and not mask.all():
        raise ValueError(
            "the balance of experts counts tokens, of which a slice knows its own, and its "
            "mask those before it, too (config.output_router_logits: True, "
            "attention_mask: with padding); pass rows of one length, or use slices=1"
        )


def verify_mask(mask: Tensor, lengths: Sequence[int], has_windows: bool) -> None:
    """Check that a mask of four dimensions is causal."""
    if has_windows:
        raise ValueError(
            "layers with a sliding window keep the keys of it alone, which a mask of four "
            f"dimensions does not know (shape of attention_mask: {tuple(mask.shape)}); pass a "
            "mask of padding, or use slices=1"
        )
    least = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    for start, end in pairwise(accumulate(lengths, initial=0)):
        if (mask[..., start:end, end:] > least).any():
            raise ValueError(
                "slices are for causal models, in which no token looks at later ones "
                f"(attention_mask: tokens {start} to {end - 1} look at those after {end - 1}); "
                "pass a causal mask, or use slices=1"
            )
