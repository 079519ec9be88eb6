"""The labels that count in the loss of a model of Transformers, as far as the model tells."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

__all__: list[str] = []

#: The label that counts nowhere, for PyTorch's losses and so for those of Transformers.
IGNORED = -100


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of a model compares each label with the output in front of it.

    The library's loss for causal models does. Some models, as BART's decoder alone, are of that
    kind by their names, and compute another loss in their own code. The virtual tokens of an
    adapter stand in front of the first label; those of prefix tuning do not.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = base_of(model)
    causal = LOSS_MAPPING.get(str(getattr(base, "loss_type", None))) is ForCausalLMLoss
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    calls_it = code is not None and "loss_function" in code.co_names
    encodes = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    adapter: Any = getattr(model, "active_peft_config", None)
    is_prompt = getattr(adapter, "is_prompt_learning", False)
    is_prompt = is_prompt and adapter.peft_type != "PREFIX_TUNING"
    return causal and calls_it and not encodes and not is_prompt


def ctc_reduction(model: nn.Module) -> str | None:
    """The reduction of CTC losses of rows, ``"sum"`` or ``"mean"``; None for other models."""
    base = base_of(model)
    is_ctc = any(x.__name__.endswith("ForCTC") for x in type(base).__mro__)
    return getattr(base.config, "ctc_loss_reduction", None) if is_ctc else None


def ignored_pixels(model: nn.Module) -> int:
    """The label of pixels that counts nowhere in a model that labels each pixel."""
    config: Any = getattr(base_of(model), "config", None)
    names = ("semantic_loss_ignore_index", "loss_ignore_index")
    return next((getattr(config, name) for name in names if hasattr(config, name)), IGNORED)


def base_of(model: nn.Module) -> Any:
    """The model itself, if it has adapters."""
    return getattr(model, "get_base_model", lambda: model)()
