"""U-Net (B, C), the model of the torchgpipe paper's experiments on skips.

::

    encoder 1 ──────────────────────────→ decoder 1 ──→ output
        └──→ encoder 2 ────────────→ decoder 2 ──┘
                 └──→ bottleneck ──────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.models.skips import Stash, isolated
from torchgpipe.skip import Namespace, pop, skippable

__all__ = ["unet"]


@skippable(pop=["skip"])
class Join(nn.Module):
    """Join the input and the skip of an encoder along the channels."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return torch.cat([input, skip], dim=1)


def convolutions(
    name: str, count: int, channels: tuple[int, int, int], dropout: float
) -> Iterator[tuple[str, nn.Module]]:
    """Layers of a stack of convolutions, with their names.

    Args:
        name: prefix of the names.
        count: number of convolutions.
        channels: of the input, between the convolutions, and of the output.
        dropout: share of the channels to drop.
    """
    first, inner, last = channels
    widths = [first, *[inner] * (count - 1), last]
    for k, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        yield f"{name}_conv{k}", nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        yield f"{name}_dropout{k}", nn.Dropout2d(dropout)
        yield f"{name}_norm{k}", nn.InstanceNorm2d(outputs)
        yield f"{name}_relu{k}", nn.LeakyReLU(0.01)


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
    dropout: float = 0.1,
) -> nn.Sequential:
    """U-Net (B, C): images to images of as many pixels.

    The shapes are ``(rows, input_channels, h, w)`` and ``(rows, output_channels, h, w)``; ``h`` and
    ``w`` must be multiples of ``2 ** depth``, and not both equal to it, since a normalisation needs
    more than one pixel.

    Each encoder doubles the channels. The bottleneck doubles them once more and halves them again,
    and each decoder halves them, down to half of the base. The layers and their number are those of
    torchgpipe's model (https://arxiv.org/abs/2004.09910; kakaobrain/torchgpipe,
    ``benchmarks/models/unet``), so the balances that were published for it fit.

    Args:
        depth: number of encoders, and of decoders.
        num_convs: B, the number of convolutions in an encoder, a decoder and the bottleneck.
        base_channels: C, the channels of the first encoder.
        input_channels: channels of the input.
        output_channels: channels of the output.
        dropout: share of the channels to drop after each convolution.

    Raises:
        ValueError: there is no encoder or no convolution, or C is odd.
    """
    if depth < 1 or num_convs < 1:
        raise ValueError(
            "there must be an encoder and a convolution in it "
            f"(depth: {depth}, num_convs: {num_convs}); take 1 or more of each"
        )
    if base_channels < 2 or base_channels % 2:
        raise ValueError(
            "the last decoder has half of the base's channels "
            f"(base_channels: {base_channels}); take an even number"
        )
    skips = [Namespace() for _ in range(depth)]
    widths = [base_channels << k for k in range(depth)]

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = input_channels
    for k, (width, skip) in enumerate(zip(widths, skips), start=1):
        name = f"encoder{k}"
        layers.update(convolutions(name, num_convs, (channels, width, width), dropout))
        layers[f"{name}_stash"] = isolated(Stash(), skip)
        layers[f"{name}_down"] = nn.MaxPool2d(2)
        channels = width
    inside = (channels, 2 * channels, channels)
    layers.update(convolutions("bottleneck", num_convs, inside, dropout))
    for k, (width, skip) in reversed([*enumerate(zip(widths, skips), start=1)]):
        name = f"decoder{k}"
        layers[f"{name}_up"] = nn.Upsample(scale_factor=2)
        layers[f"{name}_join"] = isolated(Join(), skip)
        outside = (2 * width, width // 2, width // 2)
        layers.update(convolutions(name, num_convs, outside, dropout))
    layers["output"] = nn.Conv2d(base_channels // 2, output_channels, 1, bias=False)
    return nn.Sequential(layers)
