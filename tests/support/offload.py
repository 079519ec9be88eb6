"""Layers that save tensors of all sorts, for cells that keep them in the memory of the host."""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchgpipe.devices.streams import current_stream

#: The size of the last dimension: a row of a micro-batch has at least 1 KiB.
WIDTH = 256


class Attention(nn.Module):
    """A block of a transformer, with norms and dropout."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d / self.heads), -1)
        x = x + self.drop(self.out((self.drop(a) @ v).transpose(1, 2).reshape(b, s, d)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Views(nn.Module):
    """Views of one storage, with other strides and offsets, one of them expanded."""

    def forward(self, x):
        a, b = x.chunk(2, -1)
        c = x.t().expand(2, *x.t().shape)[1].t()
        return torch.cat([a * b, (b * c[:, x.shape[1] // 2 :]).sin()], -1)


class Holding(nn.Module):
    """A layer that holds what it has saved."""

    def forward(self, x):
        self.last = x.tanh()
        return self.last * self.last


class Side(nn.Module):
    """A layer with a stream of its own."""

    def forward(self, x):
        side, own = torch.Stream(x.device), current_stream(x.device)
        side.wait_stream(own)
        with side:
            y = x.tanh() * x
        x.record_stream(side)
        own.wait_stream(side)
        y.record_stream(own)
        return y * 1


class Inner(nn.Module):
    """A layer with a checkpoint of PyTorch within."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class OwnWeight(nn.Module):
    """Weights, and views of one, some of them without its graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x @ self.weight.t() @ self.weight[:, :WIDTH].detach() * self.scale


class Complex(nn.Module):
    """Tensors that are more than strided views: conjugates, and negative imaginary parts."""

    def forward(self, x):
        z = torch.complex(x, x.sin())
        return (z.conj() * z.exp().conj()).imag.cos() * x


class Changing(nn.Module):
    """A layer that changes what it has saved, legally: autograd has a copy of its own."""

    def forward(self, x):
        return nn.functional.rrelu(x - 0.5, training=True).mul_(2)


class Spoiling(nn.Module):
    """A layer that changes what its first call has saved, so that the gradient would be wrong."""

    called = False

    def forward(self, x):
        y = x.exp()
        z = y * 2
        if not self.called:
            y.add_(1)
        self.called = True
        return z


LAYERS = {
    "views": Views,
    "held": Holding,
    "side stream": Side,
    "inner checkpoint": Inner,
    "views of weights": OwnWeight,
    "complex": Complex,
    "in place": Changing,
    "norm and dropout": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout()),
}


def stack(make):
    """Layers between linear ones, for two partitions."""
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH), make()]
    return nn.Sequential(*layers)
