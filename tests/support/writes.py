"""Layers that compute a random program of views and of changes in place through them."""

import random

import torch
from torch import nn


class Writes(nn.Module):
    """A random program: its values share memory, and are changed in place.

    All values are squares, so that a transposed one has the shape of the others.
    """

    def __init__(self, seed, length=9, size=4):
        super().__init__()
        rng = random.Random(seed)
        self.weight = nn.Parameter(torch.randn(size, size) / 2)
        self.register_buffer("table", torch.randn(size, size))
        kinds = [rng.choice((VIEWS, VIEWS, WRITES, WRITES, FRESH)) for _ in range(length)]
        self.steps = [(rng.choice(kind), rng.randrange(100), rng.randrange(4)) for kind in kinds]

    def forward(self, x):
        values = [self.table, x, self.weight * 1]
        for step, a, k in self.steps:
            # Most programs are about what was computed last.
            first, second = values[-1 - min(a % 7, a % len(values))], values[(a * 7) % len(values)]
            if step in WRITES:
                second = second.detach().clone()
            found = step(first, second, k)
            if step not in WRITES:
                values.append(found)
        return values[-1] + values[-1 - len(self.steps) % 3] @ self.weight, values[1]


VIEWS = (
    lambda x, y, k: x.t(),
    lambda x, y, k: x.t().t(),
    lambda x, y, k: x.detach(),
    lambda x, y, k: x.reshape(-1).view(4, 4),
    lambda x, y, k: x[:].expand(4, 4),
)
WRITES = (
    lambda x, y, k: x[k].zero_(),
    lambda x, y, k: x.t()[k].add_(y[k]),
    lambda x, y, k: x[:, k].mul_(0.5),
    lambda x, y, k: x.add_(y.sum()),
    lambda x, y, k: x.t().t().narrow(0, k % 3, 2).copy_(y[1:3]),
    lambda x, y, k: x.diagonal().fill_(k),
)
FRESH = (
    lambda x, y, k: x * 1,
    lambda x, y, k: x.sin(),
    lambda x, y, k: x + y.t(),
    lambda x, y, k: x @ y,
)
