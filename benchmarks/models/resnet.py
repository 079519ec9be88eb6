"""ResNet-101, the model of the torchgpipe paper's experiment on accuracy.

Every layer of a residual block is a layer of the flat model. The block's input goes as a skip to
the layer that adds it::

    ──→ stash ──→ conv1 ──→ bn1 ──→ … ──→ conv3 ──→ bn3 ──→ add ──→ relu3 ──→
          └────────────────── skip ────────────────────────→┘
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence

from torch import Tensor, nn

from benchmarks.models.skips import Stash, isolated
from torchgpipe.skip import Namespace, pop, skippable

__all__ = ["resnet", "resnet101", "usual_name"]


@skippable(pop=["skip"])
class Add(nn.Module):
    """Add the input of the block."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return input + skip


@skippable(pop=["skip"])
class AddDownsampled(nn.Sequential):
    """Add the input of the block, after fitting it to the size and channels of the output."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        for layer in self:
            skip = layer(skip)
        return input + skip


def bottleneck(inputs: int, inner: int, stride: int) -> Iterator[tuple[str, nn.Module]]:
    """Layers of a block with ``4 * inner`` output channels, by name."""
    outputs = 4 * inner
    skip = Namespace()
    yield "stash", isolated(Stash(), skip)
    yield "conv1", nn.Conv2d(inputs, inner, 1, bias=False)
    yield "bn1", nn.BatchNorm2d(inner)
    yield "relu1", nn.ReLU()
    yield "conv2", nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
    yield "bn2", nn.BatchNorm2d(inner)
    yield "relu2", nn.ReLU()
    yield "conv3", nn.Conv2d(inner, outputs, 1, bias=False)
    yield "bn3", nn.BatchNorm2d(outputs)
    if inputs == outputs and stride == 1:
        yield "add", isolated(Add(), skip)
    else:
        fit = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        yield "downsample", isolated(AddDownsampled(*fit), skip)
    yield "relu3", nn.ReLU()


def resnet(blocks: Sequence[int], num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """A ResNet: images of shape ``(rows, 3, h, w)`` to logits of shape ``(rows, num_classes)``.

    Source: `He et al. <https://arxiv.org/abs/1512.03385>`_, table 1, in torchvision's form, where
    the second convolution of a block has the stride. Layers with parameters have torchvision's
    order and, up to :func:`usual_name`, its names, so torchvision's weights fit.

    Args:
        blocks: number of blocks in each stage; each stage but the first halves the image, and
            doubles the channels.
        num_classes: number of classes.
        width: channels between the convolutions of the first stage.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    layers["bn1"] = nn.BatchNorm2d(width)
    layers["relu"] = nn.ReLU()
    layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels = width
    for stage, count in enumerate(blocks):
        for k in range(count):
            stride = 2 if stage > 0 and k == 0 else 1
            for name, layer in bottleneck(channels, width << stage, stride):
                layers[f"layer{stage + 1}_{k}_{name}"] = layer
            channels = 4 * width << stage
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, num_classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """ResNet-101, of 44,549,160 parameters for 1000 classes; see :func:`resnet`."""
    return resnet([3, 4, 23, 3], num_classes)


def usual_name(key: str) -> str:
    """Translate a key of this model's ``state_dict`` into torchvision's.

    ::

        >>> usual_name("layer3_22_conv1.weight")
        'layer3.22.conv1.weight'
    """
    return re.sub(r"^layer(\d+)_(\d+)_", r"layer\1.\2.", key)
