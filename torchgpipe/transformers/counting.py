"""The loss of a mini-batch, of those that a model of Transformers returns for its micro-batches.

Models of Transformers return the mean over the labels that count: those that are not -100, and in a
causal model those that have a token in front of them. Trainer may tell a model how many labels all
mini-batches of a step have, *N*. Some models divide the sum of their losses by that number, and
others ignore it. The model does not show which of the two it does. So let micro-batch *i* have *c*
labels that count, of *C* in the mini-batch. It is told *N c / C*, and its loss counts *c / C*:

- The sum *s* of the losses of its labels is divided by what the model was told. Then the whole is
  the sum of all *s / N*, as the model itself would return for the mini-batch.
- A mean over labels *s / c* stays one. Then the whole is the sum of all *s / C*, the mean over the
  mini-batch.
- What a model adds to either, as routers of mixtures of experts do, becomes a mean.

Losses of another kind are sums or means over rows, each row's loss as CTC has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.hugging_face import IGNORED, base_of
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []

#: PEFT's names of types of adapters whose virtual tokens are in the key-value cache. Those of other
#: adapters stand in front of the first label.
CACHED = "PREFIX_TUNING", "CARTRIDGE"


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of a model compares each label with the output in front of it.

    The library's loss for causal models does. Some models, as BART's decoder alone, are of that
    kind by their names, and compute another loss in their own code. The virtual tokens of an
    adapter stand in front of the first label, unless they are in a cache.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = base_of(model)
    causal = LOSS_MAPPING.get(str(getattr(base, "loss_type", None))) is ForCausalLMLoss
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    calls_it = code is not None and "loss_function" in code.co_names
    encodes = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    adapter: Any = getattr(model, "active_peft_config", None)
    is_prompt = getattr(adapter, "is_prompt_learning", False)
    is_prompt = is_prompt and adapter.peft_type not in CACHED
    return causal and calls_it and not encodes and not is_prompt


def ctc_reduction(model: nn.Module) -> str | None:
    """The reduction of CTC losses of rows, ``"sum"`` or ``"mean"``; None for other models."""
    base = base_of(model)
    is_ctc = any(x.__name__.endswith("ForCTC") for x in type(base).__mro__)
    config: Any = getattr(base, "config", None)
    return getattr(config, "ctc_loss_reduction", None) if is_ctc else None


def ignored_pixels(model: nn.Module) -> int:
    """The label of pixels that counts nowhere in a model that labels each pixel.

    With one label, as Segformer may have, the loss is a mean over all pixels.
    """
    config: Any = getattr(base_of(model), "config", None)
    if getattr(config, "num_labels", None) == 1:
        return IGNORED
    names = ("semantic_loss_ignore_index", "loss_ignore_index")
    return next((getattr(config, name) for name in names if hasattr(config, name)), IGNORED)


#: How a model's loss weighs its rows: by the number of labels, tokens or objects that a row has
#: (``shifted``: but for the first in each row), or equally (``rows``); ``sum`` adds their losses.
WAYS = ("labels", "shifted labels", "tokens", "shifted tokens", "objects", "rows", "sum")


def usual_way(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """The way in which a model of Transformers weighs its rows, by what is known of its class."""
    if reduction := ctc_reduction(model):
        return "sum" if reduction == "sum" else "rows"
    return "shifted labels" if shifts_labels(model) and "shift_labels" not in kwargs else "labels"


def counts_by(
    way: str,
    model: nn.Module,
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    sizes: Sequence[int],
) -> Tensor:
    """Count what has a weight in the loss of each micro-batch, of shape ``(m,)``.

    Args:
        way: one of :data:`WAYS`. What rows do not have is counted by rows.
        model: the model.
        kwargs: its arguments.
        names: the arguments that are labels.
        sizes: the number of rows of each micro-batch.
    """
    counted: list[Tensor] = []
    if way.endswith("labels"):
        counted = labels_of(model, kwargs, names, sum(sizes))
    elif way.endswith("tokens"):
        mask = kwargs.get("attention_mask")
        counted = [mask.bool()] if isinstance(mask, Tensor) and mask.dim() == 2 else []
    elif way == "objects":
        lists = [x for x in kwargs.values() if type(x) is list and len(x) == sum(sizes)]
        numbers = [sum(x.numel() for x in Batch(row)) for row in zip(*lists)]
        counted = (
            [torch.ones(len(numbers), max(numbers)).cumsum(1) <= torch.tensor(numbers)[:, None]]
            if lists
            else []
        )
    return counts_of(counted, sizes, way.startswith("shifted"))


def labels_of(
    model: nn.Module, kwargs: Mapping[str, Any], names: Sequence[str], rows: int
) -> list[Tensor]:
    """The labels of a mini-batch, by which its rows count: :data:`IGNORED` counts nowhere."""
    if "shift_labels" in kwargs:
        return [kwargs["shift_labels"]]
    mask = kwargs.get("bool_masked_pos")
    values = [kwargs.get(name) for name in names if name != "bool_masked_pos"]
    ids = kwargs.get("input_ids")
    if isinstance(ids, Tensor) and any(name.endswith("_positions") for name in names):
        # Models of question answering ignore an answer whose position is after the end of the row.
        values = [x if x is None else x.masked_fill(x >= ids.shape[1], IGNORED) for x in values]
    labels = [x for x in values if isinstance(x, Tensor) and x.dim() and len(x) == rows]
    pixels = ignored_pixels(model)
    labels = [x.masked_fill(x == pixels, IGNORED) if x.dim() > 2 else x for x in labels]
    # A false label counts, too. ``counts_of`` counts true Booleans alone, but all integers.
    labels = [x.int() if x.dtype == torch.bool else x for x in labels]
    if not isinstance(mask, Tensor):
        return labels
    # Where labels are images, a row counts by its masked patches, and not by its pixels.
    return [mask, *(x for x in labels if not x.is_floating_point())]


def counts_of(labels: Sequence[Tensor], sizes: Sequence[int], shifted: bool) -> Tensor:
    """Count the labels of each micro-batch.

    Args:
        labels: tensors of shape ``(rows, ...)``. All numbers of floating point count, and of truth
            values those that are true.
        sizes: the number of rows of each micro-batch.
        shifted: whether the first label in each row counts nowhere.

    Returns:
        A tensor of floating point, of shape ``(m,)``. Without labels these are the rows.
    """
    row_counts = torch.tensor([float(size) for size in sizes])
    if not labels:
        return row_counts
    rows = torch.zeros(len(labels[0]), device=labels[0].device)
    for x in labels:
        if shifted and x.dim() > 1:
            x = x[:, 1:]
        counted = x if x.dtype == torch.bool else x != IGNORED
        counted = torch.ones_like(x) if x.is_floating_point() else counted
        rows += counted.reshape(len(x), -1).sum(1)
    return torch.stack([part.sum() for part in rows.split([*sizes])])


def shares_of(counts: Tensor, *, nan_if_empty: bool = False) -> Tensor:
    """The share of each micro-batch in the loss of the mini-batch, of shape ``(m,)``.

    Args:
        counts: the labels of each micro-batch.
        nan_if_empty: whether the loss of a mini-batch without labels is NaN, and not zero.
    """
    return counts / (counts.sum() if nan_if_empty else counts.sum().clamp(min=1))


def told(counts: Tensor, items: Tensor | float) -> list[Tensor]:
    """The number of labels to pass to each micro-batch as ``num_items_in_batch``.

    Args:
        counts: the labels of each micro-batch.
        items: the labels of all mini-batches of a step.
    """
    if isinstance(items, Tensor):
        counts = counts.to(items.device)
    # A micro-batch without labels is told the number for one label: 0 / 0 would make its loss NaN.
    return [*(counts.clamp(min=1) * items / counts.sum().clamp(min=1))]


def whole(losses: Tensor, shares: Tensor) -> Tensor:
    """The loss of the mini-batch, of shape ``()``.

    Args:
        losses: the losses of the micro-batches, of shape ``(m,)``.
        shares: their shares. A mean over no label is NaN, and its share is zero.
    """
    shares = shares.to(losses.device, losses.dtype)
    return torch.where(shares == 0, torch.zeros_like(losses), losses * shares).sum()
