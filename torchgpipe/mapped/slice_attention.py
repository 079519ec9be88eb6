"""Attention of slices without masks, where kernels know that the last query sees all keys.

``scaled_dot_product_attention`` takes ``is_causal`` for a whole sequence. In a slice, whose queries
are the last ones of its keys, it would let the first query see the first key alone. So Transformers
makes a mask for each slice, with which kernels compute all pairs, and need as many keys as queries
have heads. FlashAttention's own operator begins at the other end::

    keys        0 1 2 3 4 5
    query 4     x x x x x .      is_causal: query 4 would see key 0 alone
    query 5     x x x x x x

So models with ``attn_implementation="sdpa"`` get a :class:`SliceMask`, which is made a tensor where
no such kernel is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda

from torchgpipe import _torch

__all__: list[str] = []


class SliceStart(int):
    """The first position of a slice whose model takes a :class:`SliceMask` for a mask."""


class SliceMask:
    """The mask by which each query of a slice sees all keys up to that of its own position."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self._make = make
        self._made: dict[Any, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The mask as a tensor, which the layers that compute on a stream have in common."""
        stream = _torch.get_stream(device.index) if device.type != "cpu" else None
        if stream not in self._made:
            self._made[stream] = self._make(device=device)
        return self._made[stream]


def takes_slice_masks(model: nn.Module) -> bool:
    """Whether a model of Transformers hands masks from where they are made to where they are used.

    Those that take masks of blocks, as FlexAttention needs, do not look into them.
    """
    supports_masks = all(
        getattr(model, f"_supports_{x}", False) for x in ("attention_backend", "flex_attn", "sdpa")
    )
    return supports_masks and install()


@cache
def install() -> bool:
    """Replace Transformers' functions for ``"sdpa"`` by functions that also know slices."""
    masks: Any = import_module("transformers.masking_utils")
    attention: Any = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    before = masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], attention["sdpa"]
    causal = masks.causal_mask_function
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", partial(mask_of, before[0], causal))
    attention.register("sdpa", partial(attend, before[1]))
    return True


def mask_of(plain: Callable[..., Any], causal: Any, *args: Any, **options: Any) -> Any:
    """Make a mask as Transformers does, or a :class:`SliceMask` for a slice that is just causal."""
    start = options.get("q_offset")
    if (
        isinstance(start, SliceStart)
        and start > 0
        and options.get("mask_function") is causal
        and options.get("attention_mask") is None
        and options.get("allow_is_causal_skip")
        and not options.get("kv_offset")
    ):
        return SliceMask(partial(plain, *args, **options))
    return plain(*args, **options)


def attend(
    plain: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Compute attention as Transformers does, of ``(rows, heads, positions, features)``."""
    if isinstance(attention_mask, SliceMask):
        dropout = options.get("dropout", 0.0)
        if _has_kernel(query, key, value, dropout, options):
            output = _torch.flash_attention(
                *(query, key, value, dropout), is_causal=True, scale=options.get("scaling")
            )
            return output[0].transpose(1, 2).contiguous(), None
        attention_mask = attention_mask.on(query.device)
    return plain(module, query, key, value, attention_mask, **options)


def _has_kernel(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any]
) -> bool:
    if options.get("position_bias") is not None or options.get("softcap") is not None:
        return False
    # FlashAttention takes multiples of 8 features, as many of keys as of values, in one dtype.
    features = query.shape[-1]
    if features % 8 or value.shape[-1] != features or not query.dtype == key.dtype == value.dtype:
        return False
    grouped = query.shape[1] != key.shape[1]
    # PyTorch's function is for CUDA. The module of the tests' virtual accelerator has its own.
    module = torch.get_device_module(query.device)
    ask = getattr(module, "can_use_flash_attention", cuda.can_use_flash_attention)
    return bool(ask(cuda.SDPAParams(query, key, value, None, dropout, False, grouped)))
