"""The cells of AmoebaNet-D: which operation takes which state.

`Real et al. <https://arxiv.org/abs/1802.01548>`_ found them. What follows is ``amoeba_net_d`` of
tensorflow/tpu (``models/official/amoeba_net/model_specs.py``). Its normal cell joins the states 0,
3, 4 and 6, where the authors of torchgpipe read 4, 5 and 6 in the paper. The counts that they and
the authors of GPipe print decide: (18, 208) has 81.5 million parameters with the former, and 71.2
million with the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Genotype", "NORMAL", "REDUCTION", "FactorizedReduction", "convolution"]

#: Makes an operation of a number of channels and a stride.
Operation = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Genotype:
    """A cell of five combinations, each the sum of two operations on earlier states.

    State 0 comes from the output of the cell before, state 1 from that of the one before it, and
    combination ``k`` makes state ``2 + k``.

    Args:
        operations: ten pairs of a state and what it goes through; two by two they are added.
        output: the states that are joined along the channels at the end.
        stride: of what operates on the states 0 and 1.
    """

    operations: tuple[tuple[int, Operation], ...]
    output: tuple[int, ...]
    stride: int


def convolution(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """ReLU, convolution and batch normalisation; the image has its size divided by the stride."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class FactorizedReduction(nn.Module):
    """Halves images of shape ``(rows, inputs, h, w)``, and skips none of the rows and columns.

    Half of the ``outputs`` channels see the pixels in even places, the others those in odd ones.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, input: Tensor) -> Tensor:
        input = input.relu()
        # One row and one column fewer in front, and as many zeros behind.
        shifted = F.pad(input, (-1, 1, -1, 1))
        output: Tensor = self.norm(torch.cat([self.even(input), self.odd(shifted)], dim=1))
        return output


def none(channels: int, stride: int) -> nn.Module:
    """Nothing; no cell asks for it with a stride."""
    assert stride == 1
    return nn.Identity()


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    """The largest of four; also of what is left at the end of an odd row."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    """The largest of nine."""
    return nn.MaxPool2d(3, stride, padding=1)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    """The mean of nine, or of as many of them as are in the image."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    """A convolution of single pixels."""
    return convolution(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """A convolution, through a bottleneck of a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        convolution(channels, narrow),
        convolution(narrow, narrow, (3, 3), (stride, stride)),
        convolution(narrow, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Seven pixels across and then seven down, through such a bottleneck."""
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
