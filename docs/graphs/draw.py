"""Draw the pictures of docs/graphs.rst: ``python docs/graphs/draw.py``."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import GPipe, ScheduledLoss

FOLDER = Path(__file__).parent


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    layers = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 12 * 12, 4)),
    )
    model = GPipe(layers, balance=[1, 1], devices=["cpu"] * 2, chunks=4)
    training = ScheduledLoss(model, F.cross_entropy, schedule="zbh1", stages="graph")
    training.costs(torch.rand(16, 3, 16, 16), torch.randint(4, (16,)))
    training.graphs[1].svg(folder / "whole.svg", split=False)
    training.graphs[1].svg(folder / "halves.svg", split=True)


if __name__ == "__main__":
    draw(FOLDER)
