"""Layers that change parameters of their own in their forward, and use what they change."""

import torch
from torch import nn

#: How a layer gives its parameter a new value, by what it is.
CHANGES = {
    "new memory": lambda layer, x: setattr(layer.scale, "data", x),
    "in place": lambda layer, x: layer.scale.copy_(x),
    "in place by itself": lambda layer, x: layer.scale.mul_(0.8).add_(0.1),
    "in place in data": lambda layer, x: layer.scale.data.copy_(x),
    "signs in data": lambda layer, x: layer.scale.data.neg_(),
    "another parameter": lambda layer, x: setattr(layer, "scale", like(layer.scale, x)),
    "another dtype": lambda layer, x: setattr(layer.scale, "data", x.double()),
    "another shape": lambda layer, x: setattr(layer.scale, "data", x.view(1, -1)),
}


def like(parameter, x):
    return nn.Parameter(x, requires_grad=parameter.requires_grad)


class Scaled(nn.Module):
    """A layer that divides by an average of its input's size, which is a parameter.

    Args:
        change: one of the changes above.
        trains: whether the parameter requires a gradient.
    """

    def __init__(self, change, trains=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=trains)
        self.change = CHANGES[change]

    def forward(self, x):
        with torch.no_grad():
            found = 0.5 * self.scale.detach().flatten() + 0.5 * x.abs().mean(0)
            self.change(self, found.to(x.dtype))
        return (x / self.scale.clone().flatten()).tanh().to(x.dtype)


class SpectralNorm(nn.Module):
    """A layer whose weight is divided by its largest singular value, in the way of GANs of 2018."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        weight = layer.weight
        del layer._parameters["weight"]
        layer.register_parameter("weight_bar", nn.Parameter(weight.data))
        layer.register_parameter("weight_u", unit(torch.randn(len(weight))))
        layer.register_parameter("weight_v", unit(torch.randn(weight[0].numel())))

    def forward(self, x):
        u, v, weight = (getattr(self.layer, f"weight_{name}") for name in ("u", "v", "bar"))
        v.data = nn.functional.normalize(weight.data.t() @ u.data, dim=0)
        u.data = nn.functional.normalize(weight.data @ v.data, dim=0)
        self.layer.weight = weight / u.dot(weight @ v)
        return self.layer(x)


def unit(vector):
    return nn.Parameter(nn.functional.normalize(vector, dim=0), requires_grad=False)
