"""A small task for the examples: is a point within a ball?"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def layers(width: int = 64) -> nn.Sequential:
    """Eight layers, two for each of four partitions."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 2))


def loader(rows: int = 768) -> DataLoader[tuple[Tensor, ...]]:
    """Points in eight dimensions, the same in each run, in mini-batches of 32."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.norm(dim=1) > 2.7).long()), batch_size=32)
