"""Models of images: ViT, Perceiver, DINO, DETR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.projects.parts import Attention, FeedForward

__all__ = ["DETR", "DINO", "Perceiver", "ViT"]

WIDTH = 32


class Transformer(nn.Module):
    """Pairs of attention and feed-forward, whose residuals this module adds itself."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleList([Attention(WIDTH), FeedForward(WIDTH)]) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        """Add what each layer finds."""
        layers: Any = self.layers
        for attend, feed_forward in layers:
            x = attend(x) + x
            x = feed_forward(x) + x
        return self.norm(x)


class Patches(nn.Sequential):
    """Patches of an image, as a sequence."""

    def __init__(self, size: int = 4) -> None:
        super().__init__(nn.Conv2d(3, WIDTH, size, size), nn.Flatten(2))

    def forward(self, image: Tensor) -> Any:
        """Cut an image."""
        return super().forward(image).transpose(1, 2)


class ViT(nn.Module):
    """A vision transformer as vit-pytorch has it (Dosovitskiy et al., 2021)."""

    def __init__(self, depth: int = 8, places: int = 17, classes: int = 10) -> None:
        super().__init__()
        self.to_patch_embedding = Patches()
        self.pos_embedding = nn.Parameter(torch.randn(1, places, WIDTH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.dropout = nn.Dropout(0.0)
        self.transformer = Transformer(depth)
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Linear(WIDTH, classes)

    def forward(self, image: Tensor) -> Any:
        """Classify images."""
        x = self.to_patch_embedding(image)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.pos_embedding[:, : x.shape[1]]
        x = self.transformer(self.dropout(x))
        return self.mlp_head(self.to_latent(x[:, 0]))


class DINO(nn.Module):
    """Crops of several sizes: those of one size go through the backbone together.

    This is DINO's ``MultiCropWrapper`` (Caron et al., 2021). The head sees all crops at once.
    """

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.backbone = ViT(depth)
        # The head has another type in the backbone alone.
        self.backbone.mlp_head = nn.Identity()  # type: ignore[assignment]
        layers = (nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Sequential(*layers)

    def forward(self, crops: Sequence[Tensor]) -> Any:
        """Project crops, in the order of the crops."""
        sizes = torch.tensor([x.shape[-1] for x in crops])
        ends = torch.unique_consecutive(sizes, return_counts=True)[1].cumsum(0)
        start, found = 0, []
        for end in ends:
            found.append(self.backbone(torch.cat([*crops[start:end]])))
            start = int(end)
        return self.head(torch.cat(found))


class Perceiver(nn.Module):
    """Latents that look at the input again and again (Jaegle et al., 2021).

    As perceiver-pytorch has it, all looks but the first may be one block, and so may the layers in
    between.
    """

    def __init__(self, depth: int = 4, inner: int = 2, shared: bool = False) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, WIDTH))
        found: list[nn.Module] = []
        again: nn.ModuleList | None = None
        for k in range(depth):
            if again is None or not shared or k < 2:
                again = nn.ModuleList(
                    [
                        Attention(WIDTH, context=3),
                        FeedForward(WIDTH),
                        nn.ModuleList(
                            [
                                nn.ModuleList([Attention(WIDTH), FeedForward(WIDTH)])
                                for _ in range(inner)
                            ]
                        ),
                    ]
                )
            # Lists of their own, of the same modules.
            found.append(nn.ModuleList([*again]))
        self.layers = nn.ModuleList(found)
        self.to_logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, data: Tensor, mask: Tensor | None = None) -> Any:
        """Classify points, of which a mask hides some."""
        x = self.latents.unsqueeze(0).expand(data.shape[0], -1, -1)
        if mask is not None:
            mask = mask[:, None, None, :]
        blocks: Any = self.layers
        for look, think, layers in blocks:
            x = look(x, context=data, mask=mask) + x
            x = think(x) + x
            for attend, feed_forward in layers:
                x = attend(x) + x
                x = feed_forward(x) + x
        return self.to_logits(x.mean(1))


class DecoderLayer(nn.Module):
    """A layer of DETR's decoder, which adds positions to keys and queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.look = Attention(WIDTH), Attention(WIDTH, context=WIDTH)
        self.feed_forward = FeedForward(WIDTH)

    def forward(self, x: Tensor, memory: Tensor, query: Tensor, places: Tensor) -> Any:
        """Refine what queries have found."""
        x = x + self.attend(x + query)
        x = x + self.look(x + query, memory + places)
        return x + self.feed_forward(x)


class DETR(nn.Module):
    """A detector, whose decoder layers are all classified (Carion et al., 2020)."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
        )
        self.input_proj = nn.Conv2d(16, WIDTH, 1)
        self.row, self.column = (nn.Parameter(torch.rand(50, WIDTH // 2)) for _ in range(2))
        self.encoder = nn.ModuleList(
            [nn.Sequential(Attention(WIDTH), FeedForward(WIDTH)) for _ in range(depth)]
        )
        self.decoder = nn.ModuleList([DecoderLayer() for _ in range(depth)])
        self.query_embed = nn.Embedding(5, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.class_embed = nn.Linear(WIDTH, 6)
        self.bbox_embed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, image: Tensor) -> Any:
        """Find classes and boxes, of the last layer and of those before."""
        x = self.input_proj(self.backbone(image))
        rows, _, height, width = x.shape
        places = torch.cat(
            [
                self.column[:width].unsqueeze(0).expand(height, -1, -1),
                self.row[:height].unsqueeze(1).expand(-1, width, -1),
            ],
            -1,
        ).flatten(0, 1)
        memory = x.flatten(2).transpose(1, 2) + places
        for layer in self.encoder:
            memory = layer(memory) + memory
        query = self.query_embed.weight.unsqueeze(0).expand(rows, -1, -1)
        x, found = torch.zeros_like(query), []
        for layer in self.decoder:
            x = layer(x, memory, query, places)
            found.append(self.norm(x))
        hidden = torch.stack(found, 1)
        logits, boxes = self.class_embed(hidden), self.bbox_embed(hidden).sigmoid()
        aux = [{"logits": a, "boxes": b} for a, b in zip(logits.unbind(1), boxes.unbind(1))]
        return {**aux.pop(), "aux_outputs": aux}
