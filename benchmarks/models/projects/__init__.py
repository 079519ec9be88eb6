"""Small models of public projects, rebuilt from their papers in our own words.

Each has the structure of the project's own: what its root computes between its modules, what it
keeps in lists, which weights it shares. Its size is tiny. ``PROJECTS`` has them with their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models.projects import diffusion, language, multimodal, vision
from torchgpipe import Chunk

__all__ = ["PROJECTS", "Project"]


class Project(NamedTuple):
    """A model, and its arguments.

    Attributes:
        make: makes the model.
        batch: makes its keyword arguments for so many rows.
        about: what is special about it.
        waits: whether its code asks a device for values, so that several threads help.
        ready: whether its caller divides its arguments, since it returns views one after another.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    about: str
    waits: bool = False
    ready: bool = False


def images(rows: int, size: int = 16) -> Tensor:
    """Images, whose gradients are wanted."""
    return torch.randn(rows, 3, size, size, requires_grad=True)


def words(rows: int, length: int = 12) -> Tensor:
    """Words of which none is special."""
    return torch.randint(1, language.WORDS - 1, (rows, length))


def noised(rows: int, **more: Tensor) -> dict[str, Any]:
    """Images, and other arguments."""
    return {"x": images(rows), **more}


def classified(rows: int) -> dict[str, Any]:
    """Images with times and classes."""
    return {"t": torch.randint(0, 99, (rows,)), "y": torch.randint(0, 10, (rows,))}


def spoken(rows: int) -> dict[str, Any]:
    """Images, and words among which they come."""
    ids = words(rows, multimodal.PATCHES + 6)
    ids[:, 2 : 2 + multimodal.PATCHES] = multimodal.IMAGE
    return {"input_ids": ids, "pixel_values": images(rows)}


def with_positions(rows: int) -> dict[str, Any]:
    """The same, with three positions for each."""
    found = spoken(rows)
    positions = torch.randint(0, 20, (3, *found["input_ids"].shape))
    return {**found, "position_ids": Chunk(positions, dim=1)}


def padded(rows: int) -> dict[str, Any]:
    """Sentences, of which the source ends early."""
    source = words(rows)
    source[:, -3:] = 0
    return {"source": source, "target": words(rows, 10)}


def crops(rows: int) -> dict[str, Any]:
    """Two large crops and three small ones."""
    return {"crops": [images(rows, size) for size in (16, 16, 8, 8, 8)]}


def points(rows: int) -> dict[str, Any]:
    """Points, of which a mask hides some."""
    mask = torch.rand(rows, 20) > 0.3
    return {"data": torch.randn(rows, 20, 3, requires_grad=True), "mask": mask}


PROJECTS = {
    "ViT (vit-pytorch)": Project(
        vision.ViT, lambda rows: {"image": images(rows)}, "residuals in the parent"
    ),
    "DINO": Project(vision.DINO, crops, "a list of crops of two sizes", ready=True),
    "DETR": Project(
        vision.DETR, lambda rows: {"image": images(rows)}, "all decoder layers are outputs"
    ),
    "Perceiver": Project(vision.Perceiver, points, "lists within lists, a mask of the input"),
    "Perceiver, tied": Project(
        partial(vision.Perceiver, shared=True), points, "modules that are called again"
    ),
    "guided-diffusion": Project(
        diffusion.GuidedDiffusion,
        lambda rows: noised(
            rows, timesteps=torch.randint(0, 99, (rows,)), y=torch.randint(0, 10, (rows,))
        ),
        "hs.append, hs.pop",
    ),
    "denoising-diffusion": Project(
        diffusion.DenoisingDiffusion,
        lambda rows: noised(rows, time=torch.randint(0, 99, (rows,)), x_self_cond=images(rows)),
        "self-conditioning, residuals in the parent",
    ),
    "NCSN++ (score_sde)": Project(
        diffusion.NCSNpp,
        lambda rows: noised(rows, labels=torch.randint(0, 10, (rows,))),
        "one flat list of modules",
    ),
    "DiT": Project(
        diffusion.DiT, lambda rows: noised(rows, **classified(rows)), "a condition of all blocks"
    ),
    "minGPT": Project(
        language.MinGPT,
        lambda rows: {"idx": words(rows), "targets": words(rows)},
        "labels on the first device",
    ),
    "RWKV": Project(
        language.RWKV,
        lambda rows: {"idx": words(rows), "targets": words(rows)},
        "an autograd function of the loss",
    ),
    "Zamba2": Project(
        language.Zamba2,
        lambda rows: {"ids": words(rows), "labels": words(rows)},
        "a shared block, a tied head",
    ),
    "Mixtral": Project(
        language.Mixture,
        lambda rows: {"ids": words(rows), "labels": words(rows)},
        "experts, a loss of all routers",
        waits=True,
    ),
    "encoder-decoder": Project(language.EncoderDecoder, padded, "one weight in three places"),
    "Gemma 3n": Project(
        language.Gemma3n, lambda rows: {"ids": words(rows)}, "keys shared through an object"
    ),
    "attention residuals": Project(
        language.AttentionResiduals,
        lambda rows: {"ids": words(rows)},
        "blocks read all before them",
    ),
    "DeepSeek (MTP)": Project(
        language.MultiToken, lambda rows: {"ids": words(rows)}, "the embedding once more at the end"
    ),
    "CLIP": Project(
        multimodal.CLIP, lambda rows: {"image": images(rows), "text": words(rows)}, "two towers"
    ),
    "LLaVA": Project(
        multimodal.LLaVA,
        lambda rows: {**spoken(rows), "labels": words(rows, multimodal.PATCHES + 6)},
        "patches among words",
    ),
    "Qwen3-VL": Project(
        multimodal.QwenVL, with_positions, "rows in dimension 1, deep features", waits=True
    ),
}
