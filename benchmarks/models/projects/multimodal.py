"""Models of images and text: CLIP, LLaVA, Qwen-VL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.projects.language import Block, angles_of
from benchmarks.models.projects.parts import RMSBlock
from benchmarks.models.projects.vision import Patches, Transformer

__all__ = ["CLIP", "LLaVA", "QwenVL"]

WIDTH, WORDS = 32, 50

#: The word in whose place a patch of the image comes, and how many there are.
IMAGE, PATCHES = 49, 16


class CLIP(nn.Module):
    """Two towers, and a loss that compares each image with each text (Radford et al., 2021)."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.visual = nn.Sequential(Patches(), Transformer(depth))
        self.token_embedding = nn.Embedding(WORDS, WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(16, WIDTH))
        self.transformer = nn.Sequential(*[Block() for _ in range(depth)])
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        """The contrastive loss of a micro-batch."""
        images = F.normalize(self.visual(image).mean(1), dim=-1)
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        x = self.ln_final(self.transformer(x))
        last = x[torch.arange(x.shape[0], device=text.device), text.argmax(dim=-1)]
        texts = F.normalize(last @ self.text_projection, dim=-1)
        logits = self.logit_scale.exp() * images @ texts.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class LLaVA(nn.Module):
    """The patches of an image among the words of a Llama (Liu et al., 2023)."""

    def __init__(self, vision: int = 3, depth: int = 5) -> None:
        super().__init__()
        self.vision_tower = nn.Sequential(Patches(), Transformer(vision))
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([RMSBlock(WIDTH) for _ in range(depth)])
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x = self.embed_tokens(input_ids)
        features = self.projector(self.vision_tower(pixel_values)).to(x.device, x.dtype)
        mask = (input_ids == IMAGE).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(mask, features)
        angles = angles_of(torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.lm_head(self.norm(x))
        shifted = labels[:, 1:].contiguous().to(logits.device)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten(), ignore_index=-100)


class VisionBlocks(nn.Module):
    """A tower that hands out the features of several of its layers."""

    def __init__(self, depth: int, taken: tuple[int, ...]) -> None:
        super().__init__()
        self.patch_embed = Patches()
        self.blocks = nn.ModuleList([RMSBlock(WIDTH) for _ in range(depth)])
        self.mergers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in (*taken, depth)])
        self.taken = taken

    def forward(self, image: Tensor) -> Any:
        """Features of the last layer, and of those that are taken."""
        found: list[Tensor] = []
        x = self.patch_embed(image)
        angles = angles_of(torch.arange(x.shape[1], device=x.device)[None])
        for k, block in enumerate(self.blocks):
            x = block(x, angles)
            if k in self.taken:
                found.append(self.mergers[len(found)](x))
        return self.mergers[-1](x), found


class QwenVL(nn.Module):
    """Positions of shape (3, rows, length), and features that are added to early layers.

    This is Qwen3-VL (Qwen team, 2025), whose positions are those of Qwen2-VL.
    """

    def __init__(self, vision: int = 3, depth: int = 5) -> None:
        super().__init__()
        self.visual = VisionBlocks(vision, (0, 1))
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([RMSBlock(WIDTH) for _ in range(depth)])
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, position_ids: Tensor) -> Any:
        """Logits of the next words."""
        x = self.embed_tokens(input_ids)
        features, deep = self.visual(pixel_values)
        mask = input_ids == IMAGE
        x = x.masked_scatter(mask.unsqueeze(-1), features)
        # Each of the three has a share of the angles.
        shares = [y.chunk(4, -1)[k] for k, y in enumerate(angles_of(position_ids))]
        angles = torch.cat([*shares, shares[0]], -1)
        for k, layer in enumerate(self.layers):
            x = layer(x, angles)
            if k < len(deep):
                x = x.clone()
                x[mask, :] = x[mask, :] + deep[k].flatten(0, 1)
        return self.lm_head(self.norm(x))
