"""Settings of the papers' experiments: model, size, partitions and micro-batches.

Source: Huang et al., GPipe (arXiv 1811.06965), tables 1 and 2; Kim et al., torchgpipe
(arXiv 2004.09910), tables 1 to 4, with the settings that torchgpipe 0.0.7 published for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models

__all__ = ["MEMORY", "SCALE", "SPEED", "Experiment", "scaled"]

#: Scale for a CPU: divisor of channels, pixels on a side, the most samples in a mini-batch.
SCALE = (16, 64, 8)

#: ``"name"``, a function of :mod:`benchmarks.models`, and the arguments of that function.
Model = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A model in training.

    Args:
        name: in the paper.
        model: to train.
        size: pixels on a side of an image, or tokens in a row.
        batch: samples in a mini-batch.
        n: number of partitions.
        m: number of micro-batches, or None for the plain model.
        mode: which micro-batches are checkpointed.
        published: published samples per second of torchgpipe 0.0.5 on Tesla P40.
    """

    name: str
    model: Model
    size: int
    batch: int
    n: int = 1
    m: int | None = None
    mode: str = "except_last"
    published: float | None = None


def build(model: Model) -> nn.Sequential:
    """Make a model."""
    arguments = dict(model)
    layers: nn.Sequential = getattr(models, arguments.pop("name"))(**arguments)
    return layers


def samples(model: Model, size: int, batch: int, device: torch.device | str) -> Tensor:
    """A mini-batch: ``(batch, 3, size, size)``, or ``(batch, size)`` for a language model."""
    if model["name"] == "gpt":
        return torch.randint(model.get("vocabulary", 50257), (batch, size), device=device)
    return torch.rand(batch, model.get("input_channels", 3), size, size, device=device)


def amoebanetd(layers: int, filters: int) -> Model:
    """AmoebaNet-D (L, D)."""
    return {"name": "amoebanetd", "num_layers": layers, "num_filters": filters}


def unet(convs: int, channels: int) -> Model:
    """U-Net (B, C)."""
    return {"name": "unet", "num_convs": convs, "base_channels": channels}


RESNET: Model = {"name": "resnet", "blocks": [3, 4, 23, 3], "width": 64}

#: Throughput: the model stays the same, and the mini-batch is the largest that fits.
SPEED = {
    "unet": [
        Experiment("baseline", unet(5, 64), 192, 40, published=28.5),
        Experiment("pipeline-1", unet(5, 64), 192, 80, 1, 2, published=24.456),
        Experiment("pipeline-2", unet(5, 64), 192, 512, 2, 32, published=35.502),
        Experiment("pipeline-4", unet(5, 64), 192, 512, 4, 16, published=67.042),
        Experiment("pipeline-8", unet(5, 64), 192, 640, 8, 40, published=88.497),
    ],
    "resnet101": [
        Experiment("baseline", RESNET, 224, 118, published=95.862),
        Experiment("pipeline-1", RESNET, 224, 220, 1, 2, published=81.796),
        Experiment("pipeline-2", RESNET, 224, 25000, 2, 1667, published=135.539),
        Experiment("pipeline-4", RESNET, 224, 5632, 4, 256, published=265.958),
        Experiment("pipeline-8", RESNET, 224, 5400, 8, 150, published=411.662),
    ],
    "amoebanetd": [
        Experiment("n2m1", amoebanetd(18, 256), 224, 96, 2, 1, "always", published=26.733),
        Experiment("n2m4", amoebanetd(18, 256), 224, 256, 2, 4, published=41.133),
        Experiment("n2m32", amoebanetd(18, 256), 224, 1280, 2, 32, published=47.386),
        Experiment("n4m1", amoebanetd(18, 256), 224, 160, 4, 1, "always", published=26.827),
        Experiment("n4m4", amoebanetd(18, 256), 224, 360, 4, 4, published=44.543),
        Experiment("n4m32", amoebanetd(18, 256), 224, 1152, 4, 32, published=72.412),
        Experiment("n8m1", amoebanetd(18, 256), 224, 196, 8, 1, "always", published=24.918),
        Experiment("n8m4", amoebanetd(18, 256), 224, 480, 8, 4, published=70.065),
        Experiment("n8m32", amoebanetd(18, 256), 224, 1280, 8, 32, published=132.413),
    ],
}

#: Memory: the model grows with the number of devices.
MEMORY = {
    "unet": [
        Experiment("baseline", unet(6, 72), 192, 32),
        Experiment("pipeline-1", unet(11, 128), 192, 32, 1, 32),
        Experiment("pipeline-2", unet(24, 128), 192, 32, 2, 32),
        Experiment("pipeline-4", unet(24, 160), 192, 32, 4, 32),
        Experiment("pipeline-8", unet(48, 160), 192, 32, 8, 32),
    ],
    "amoebanetd": [
        Experiment("baseline", amoebanetd(18, 208), 224, 128),
        Experiment("pipeline-1", amoebanetd(18, 416), 224, 128, 1, 128),
        Experiment("pipeline-2", amoebanetd(18, 544), 224, 128, 2, 128),
        Experiment("pipeline-4", amoebanetd(36, 544), 224, 128, 4, 128),
        Experiment("pipeline-8", amoebanetd(72, 512), 224, 128, 8, 128),
    ],
}


def scaled(experiment: Experiment, channels: int, size: int, batch: int) -> Experiment:
    """An experiment that a CPU can do, with as many layers.

    Args:
        experiment: at full size.
        channels: divisor of channels and classes, which stay multiples of four.
        size: pixels on a side of an image, or tokens in a row.
        batch: the most samples, and so the most micro-batches, in a mini-batch.
    """
    model = dict(experiment.model)
    if model["name"] in ("amoebanetd", "resnet"):
        model.setdefault("num_classes", 1000)
    for key in ("num_classes", "num_filters", "base_channels", "width"):
        if key in model:
            model[key] = max(4, round(model[key] / channels / 4) * 4)
    batch = min(experiment.batch, batch)
    m = experiment.m and min(experiment.m, batch)
    return replace(experiment, model=model, size=size, batch=batch, m=m)
