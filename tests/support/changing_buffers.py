"""Layers that change buffers in their forward, and use what they change."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm


class Average(nn.Module):
    """A layer that divides by a moving average of its input's size.

    Args:
        how: the way in which the average changes: in place, in place through ``.data``, which
            PyTorch does not count, by new memory, or by a new tensor.
        size: the size of rows.
    """

    def __init__(self, how, size=4):
        super().__init__()
        self.register_buffer("average", torch.ones(size))
        self.how = how

    def forward(self, x):
        size = x.detach().abs().mean(0)
        if self.how == "in place":
            self.average.mul_(0.9).add_(size, alpha=0.1)
        elif self.how == "data":
            self.average.data.copy_(0.9 * self.average + 0.1 * size)
        elif self.how == "memory":
            self.average.data = 0.9 * self.average + 0.1 * size
        else:
            self.average = 0.9 * self.average + 0.1 * size
        # A clone, since plain PyTorch refuses to save what the next micro-batch changes.
        return (x / self.average.clone()).tanh()


class LazyAverage(nn.Module):
    """A layer whose buffer has no tensor before its first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", None)

    def forward(self, x):
        size = x.detach().abs().mean(0)
        self.average = size if self.average is None else (self.average + size) / 2
        return (x / self.average).tanh()


class Codebook(nn.Module):
    """A vector quantisation whose codes follow the rows, as moving averages of them.

    The gradient passes straight through, and a commitment pulls the rows to their codes.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x):
        which = torch.cdist(x.detach(), self.codes).argmin(1)
        one_hot = nn.functional.one_hot(which, len(self.codes)).to(x.dtype)
        chosen = self.codes[which]
        with torch.no_grad():
            self.count.mul_(0.8).add_(one_hot.sum(0), alpha=0.2)
            self.total.mul_(0.8).add_(one_hot.T @ x, alpha=0.2)
            self.codes.data.copy_(self.total / self.count.unsqueeze(1))
        return x + (chosen - x).detach() + (x - chosen).square()


class Renorm(nn.BatchNorm1d):
    """A norm that, unlike torch's own, reads its running statistics in training."""

    def forward(self, x):
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return (x - self.running_mean.clone()) * self.weight + self.bias


class Folded(nn.Module):
    """A weight with the scale of its norm, as in quantisation-aware training."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = linear(), norm

    def forward(self, x):
        scale = (self.norm.running_var + 0.1).rsqrt()
        y = nn.functional.linear(x, self.linear.weight * scale[:, None])
        y = self.norm(torch.stack([y, 2 * y], 2))[..., 0]
        return (y * (1 + self.norm.running_mean)).tanh()


class OwnNorm(nn.Module):
    """A norm by hand, which counts no batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)


class Shared(nn.Module):
    """Two layers with one buffer, which each of them changes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Average("in place"), Average("in place")
        self.second.average = self.first.average

    def forward(self, x):
        return self.second(self.first(x).exp())


def linear():
    return nn.Linear(4, 4)


#: Layers by what they are.
LAYERS = {
    "spectral_norm": lambda: spectral_norm(linear()),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "average in place": lambda: Average("in place"),
    "average in data": lambda: Average("data"),
    "average in new memory": lambda: Average("memory"),
    "average replaced": lambda: Average("replaced"),
    "lazy average": LazyAverage,
    "codebook": Codebook,
    "norm": lambda: Renorm(4),
    "shared buffer": Shared,
    "batch norm folded": lambda: Folded(nn.BatchNorm1d(4, momentum=None)),
    "instance norm folded": lambda: Folded(nn.InstanceNorm1d(4, track_running_stats=True)),
    "own norm folded": lambda: Folded(OwnNorm()),
}


def changing(name):
    """Layers, two of which are of this name."""
    torch.manual_seed(0)
    return nn.Sequential(linear(), LAYERS[name](), nn.Tanh(), LAYERS[name](), nn.Tanh(), linear())
