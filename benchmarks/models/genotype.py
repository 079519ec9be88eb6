"""Cells of AmoebaNet-D: their operations, and the state that each operation takes.

`Real et al. <https://arxiv.org/abs/1802.01548>`_ found the cells. These are ``amoeba_net_d`` of
tensorflow/tpu (``models/official/amoeba_net/model_specs.py``). Its normal cell joins states 0, 3, 4
and 6, where the authors of torchgpipe read 4, 5 and 6 in the paper. The published counts decide:
(18, 208) has 81.5 million parameters with 0, 3, 4 and 6, and 71.2 million with 4, 5 and 6; both
papers print the former.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Genotype", "NORMAL", "REDUCTION", "FactorizedReduction", "convolution"]

#: Function that makes an operation, given a number of channels and a stride.
Operation = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Genotype:
    """A cell of five combinations, each the sum of two operations on earlier states.

    State 0 comes from the output of the previous cell, state 1 from the output of the cell before
    that one, and combination ``k`` makes state ``2 + k``.

    Args:
        operations: ten pairs of a state and an operation on it; the results are added two by two.
        output: states that are joined along the channels at the end.
        stride: of the operations on states 0 and 1.
    """

    operations: tuple[tuple[int, Operation], ...]
    output: tuple[int, ...]
    stride: int


def convolution(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """ReLU, convolution and batch normalisation; the stride divides the size of the image."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class FactorizedReduction(nn.Module):
    """Halve images of shape ``(rows, inputs, h, w)`` without leaving out rows or columns.

    Half of the ``outputs`` channels see the pixels in even places, the others the odd ones.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, input: Tensor) -> Tensor:
        input = input.relu()
        # Drop a row and a column in front, and append zeros instead.
        shifted = F.pad(input, (-1, 1, -1, 1))
        output: Tensor = self.norm(torch.cat([self.even(input), self.odd(shifted)], dim=1))
        return output


def none(channels: int, stride: int) -> nn.Module:
    """The identity; no cell uses it with a stride."""
    assert stride == 1
    return nn.Identity()


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    """Maximum of four pixels, or of the fewer ones at the end of an odd row."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    """Maximum of nine pixels."""
    return nn.MaxPool2d(3, stride, padding=1)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    """Mean of nine pixels, or of the ones among them that are in the image."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    """A convolution of single pixels."""
    return convolution(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """A convolution through a bottleneck of a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        convolution(channels, narrow),
        convolution(narrow, narrow, (3, 3), (stride, stride)),
        convolution(narrow, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Convolutions of seven pixels across and seven down, through such a bottleneck."""
    narrow = channels // 4
    return nn.Sequential(
        convolution(channels, narrow),
        convolution(narrow, narrow, (1, 7), (1, stride)),
        convolution(narrow, narrow, (7, 1), (stride, 1)),
        convolution(narrow, channels),
    )


NORMAL = Genotype(
    operations=(
        *((1, conv_1x1), (1, max_pool_3x3)),
        *((1, none), (0, conv_1x7_7x1)),
        *((0, conv_1x1), (0, conv_1x7_7x1)),
        *((2, max_pool_3x3), (2, none)),
        *((1, avg_pool_3x3), (5, conv_1x1)),
    ),
    output=(0, 3, 4, 6),
    stride=1,
)

REDUCTION = Genotype(
    operations=(
        *((0, max_pool_2x2), (0, max_pool_3x3)),
        *((2, none), (1, conv_3x3)),
        *((2, conv_1x7_7x1), (2, max_pool_3x3)),
        *((3, none), (1, max_pool_2x2)),
        *((2, avg_pool_3x3), (3, conv_1x1)),
    ),
    output=(4, 5, 6),
    stride=2,
)
