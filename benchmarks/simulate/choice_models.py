"""Models of many kinds, in sizes that keep an accelerator busy, for the planner to choose for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.gpt import gpt
from benchmarks.models.resnet import bottleneck
from benchmarks.models.unet import unet
from torchgpipe.skip.tracker import skips

__all__ = ["LLAMA", "MODELS", "Model", "llama"]


class Model(NamedTuple):
    """A model with its data.

    Attributes:
        make: makes the layers.
        data: makes the input and the target of a mini-batch.
        loss: the loss.
    """

    make: Callable[[], nn.Sequential]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy


def mlp() -> nn.Sequential:
    """A deep perceptron, of whose layers a third is wider than the others."""
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(2048, wide), nn.GELU(), nn.Linear(wide, 2048))
            for k in range(18)
            for wide in ([2048] if k % 3 else [8192])
        ]
    )


class Residual(nn.Module):
    """A block of a ResNet as one layer, which has its skip within."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        layers = dict(bottleneck(inputs, inner, stride))
        self.body = nn.Sequential(*[x for x in layers.values() if not any(skips(x))][:-1])
        fit = layers.get("downsample", nn.Sequential())
        self.fit = nn.Sequential(*fit.children())

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(self.body(input) + self.fit(input))


def resnet101() -> nn.Sequential:
    """ResNet-101, whose blocks are layers of their own."""
    found: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    found += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate((3, 4, 23, 3)):
        for k in range(count):
            found.append(Residual(channels, 64 << stage, 2 if stage and not k else 1))
            channels = 256 << stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(nn.Sequential(*found[:4]), *found[4:], nn.Sequential(*head))


def grouped(layers: nn.Sequential, most: int) -> nn.Sequential:
    """Put layers that follow each other together, as many as ``most``, but for those of skips."""

    def groups() -> Iterator[nn.Module]:
        own: list[nn.Module] = []
        for layer in layers:
            has_skips = any(skips(layer))
            if own and (has_skips or len(own) == most):
                yield nn.Sequential(*own)
                own = []
            if has_skips:
                yield layer
            else:
                own.append(layer)
        if own:
            yield nn.Sequential(*own)

    return nn.Sequential(*groups())


def images(rows: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that makes images and their classes."""
    return lambda: (torch.rand(rows, 3, size, size), torch.randint(1000, (rows,)))


def pixels() -> tuple[Tensor, Tensor]:
    """Images, and as many pixels of a mask."""
    return torch.rand(32, 3, 192, 192), torch.rand(32, 1, 192, 192)


def next_word(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def language(vocabulary: int, length: int, layers: int, classes: int | None = None) -> Model:
    """A decoder of blocks of width 1024, whose head has as many words, or other classes."""

    def make() -> nn.Sequential:
        found = gpt(vocabulary, length, layers, 1024, 16)
        if classes is not None:
            found[-1] = nn.Linear(1024, classes)
        return grouped(found, 2)

    def data() -> tuple[Tensor, Tensor]:
        return torch.randint(vocabulary, (32, length)), torch.randint(
            classes or vocabulary, (32, length)
        )

    return Model(make, data, next_word)


MODELS: dict[str, Model] = {
    "MLP": Model(mlp, lambda: (torch.rand(32768, 2048), torch.rand(32768, 2048)), F.mse_loss),
    "ResNet-101": Model(resnet101, images(256, 224)),
    "U-Net": Model(lambda: grouped(unet(3, 2, 64), 4), pixels, F.mse_loss),
    "AmoebaNet-D": Model(lambda: grouped(amoebanetd(1000, 3, 256), 12), images(128, 224)),
    "GPT": language(50257, 1024, 14),
    # 147 of 299 million weights are in the embedding.
    "large embedding": language(144000, 512, 12, 1000),
    "costly head": language(100000, 512, 8),
}

#: The vocabulary of the Llama, and the length of a sequence.
LLAMA = 32000, 512


def llama() -> Any:
    """A Llama of Hugging Face Transformers, of twelve blocks of width 1024."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=LLAMA[0],
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
