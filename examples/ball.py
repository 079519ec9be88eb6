"""A small task for the examples: is a point within a ball? And a plain loop that learns it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def layers(width: int = 64) -> nn.Sequential:
    """Eight layers, two for each of four partitions."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 2))


def loader(rows: int = 768) -> DataLoader[tuple[Tensor, ...]]:
    """Points in eight dimensions, the same in each run, in mini-batches of 32."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.norm(dim=1) > 2.7).long()), batch_size=32)


def plainly(model: nn.Module, epochs: int, accumulate: int, rows: int = 768) -> list[float]:
    """The losses of a loop without a trainer, which accumulates gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=24, gamma=0.5)
    data, losses = loader(rows), []
    for _ in range(epochs):
        for k, (x, y) in enumerate(data, start=1):
            loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            # The last mini-batches of an epoch make a step even if they are fewer, as in trainers.
            if k % accumulate == 0 or k == len(data):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def compare(trainer: str, found: list[float], expected: list[float], bound: float) -> int:
    """Print mean losses of epochs; return 0 if all are as in the plain loop, and they fall."""
    columns = [torch.tensor(x).view(-1, len(loader())).mean(1).tolist() for x in (found, expected)]
    print(f"{'epoch':>5}  {trainer:>10}  {'plain':>9}")
    for epoch, (mine, theirs) in enumerate(zip(*columns), start=1):
        print(f"{epoch:5}  {mine:10.6f}  {theirs:9.6f}")
    gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if gap < bound and columns[0][-1] < columns[0][0]:
        print(f"\nAs in a plain loop in single precision: losses within {gap:.1e}.")
        return 0
    print(f"\nNot as it should be: losses differ by {gap:.1e} from a plain loop's, or do not fall.")
    return 1
