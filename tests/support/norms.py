"""Batches for batch norms, and comparisons of their statistics."""

import torch
from torch import nn

NORMS = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 4), nn.BatchNorm3d: (3, 2, 2, 2)}


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def batch(kind, rows, device, seed=0):
    """A batch far from normalised values, so that lost digits show."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, *NORMS[kind], generator=generator) * 3 + 10).to(device)
