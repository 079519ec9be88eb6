r"""The loss of a mini-batch, from the losses that a model returns for its micro-batches.

Models of Transformers return the mean over the labels that count: those that are not -100, and in a
causal model those that have a token in front of them. Trainer may tell a model how many labels all
mini-batches of a step have, *N*. Some models divide the sum of their losses by that number, and
others ignore it. The model does not show which of the two it does. So let micro-batch *i* have
:math:`c_i` labels that count, of *C* in the mini-batch. It is told :math:`N c_i / C`, and its loss
counts :math:`c_i / C`:

- The sum over labels :math:`s_i` is divided by what the model was told. Then the whole is
  :math:`\sum_i s_i / N`, as the model itself would return for the mini-batch.
- A mean over labels :math:`s_i / c_i` stays one. Then the whole is :math:`\sum_i s_i / C`, the
  mean over the mini-batch.
- What a model adds to either, as routers of mixtures of experts do, becomes a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__: list[str] = []

#: The label that counts nowhere, for PyTorch's losses and so for those of Transformers.
IGNORED = -100


def counts_of(labels: Sequence[Tensor], sizes: Sequence[int], shifted: bool) -> Tensor:
    """Count the labels of each micro-batch.

    Args:
        labels: tensors of shape ``(rows, ...)``. All numbers of floating point count.
        sizes: the number of rows of each micro-batch.
        shifted: whether the first label in each row counts nowhere.

    Returns:
        A tensor of floating point, of shape ``(m,)``. Without labels these are the rows.
    """
    found = torch.tensor([float(size) for size in sizes])
    if not labels:
        return found
    rows = torch.zeros(len(labels[0]), device=labels[0].device)
    for x in labels:
        if shifted and x.dim() > 1:
            x = x[:, 1:]
        counted = torch.ones_like(x) if x.is_floating_point() else x != IGNORED
        rows += counted.reshape(len(x), -1).sum(1)
    return torch.stack([part.sum() for part in rows.split([*sizes])])


def shares_of(counts: Tensor, *, alone: bool = False) -> Tensor:
    """The share of each micro-batch in the loss of the mini-batch, of shape ``(m,)``.

    Args:
        counts: the labels of each micro-batch.
        alone: whether the loss of a mini-batch without labels is NaN, and not zero.
    """
    return counts / (counts.sum() if alone else counts.sum().clamp(min=1))


def told(counts: Tensor, items: Tensor | float) -> list[Tensor]:
    """The number of labels to pass to each micro-batch as ``num_items_in_batch``.

    Args:
        counts: the labels of each micro-batch.
        items: the labels of all mini-batches of a step.
    """
    # At least one, since a micro-batch without labels divides by this, too.
    return [*(counts.clamp(min=1) * items / counts.sum().clamp(min=1))]


def whole(losses: Tensor, shares: Tensor) -> Tensor:
    """The loss of the mini-batch, of shape ``()``.

    Args:
        losses: the losses of the micro-batches, of shape ``(m,)``.
        shares: their shares. A mean over no label is NaN, and its share is zero.
    """
    shares = shares.to(losses.device, losses.dtype)
    return torch.where(shares == 0, torch.zeros_like(losses), losses * shares).sum()
