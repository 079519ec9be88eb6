"""A linear layer with a frozen weight of four bits, as bitsandbytes has it without a GPU."""

import copy

import torch
from torch import nn


class State:
    """The scale of a weight, in a tensor that no table of a module has."""

    def __init__(self, scale, shape):
        self.scale, self.shape = scale, shape


class PackedWeight(nn.Parameter):
    """Two numbers in each byte. A move takes the state along, and makes one of this class."""

    def __new__(cls, data, state):
        found = torch.Tensor._make_subclass(cls, data, False)
        found.state = state
        return found

    def __deepcopy__(self, memo):
        return type(self)(self.data.clone(), copy.deepcopy(self.state, memo))

    def to(self, *args, **kwargs):
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self.state.scale = self.state.scale.to(device)
        return type(self)(super().to(device), self.state)


def unpacked(packed, state):
    """The weight."""
    both = torch.stack([packed & 15, packed >> 4], -1)
    return ((both.float() - 8) * state.scale).view(state.shape)


class Product(torch.autograd.Function):
    """A product that unpacks the weight once more in backward, and keeps no other one."""

    @staticmethod
    def forward(ctx, input, packed):
        ctx.packed = packed
        return input @ unpacked(packed, packed.state).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ unpacked(ctx.packed, ctx.packed.state), None


class PackedLinear(nn.Linear):
    """A linear layer without a bias, made of another one."""

    def __init__(self, layer):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        scale = weight.abs().max() / 7
        low, high = ((weight / scale).round() + 8).to(torch.uint8).view(-1, 2).unbind(1)
        self.weight = PackedWeight(low | (high << 4), State(scale, weight.shape))
        self.bias = None

    def forward(self, input):
        return Product.apply(input, self.weight)


def pack(model):
    """Pack the weights of all linear layers without a bias but the head, in place."""
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) is nn.Linear and layer.bias is None and name != "lm_head":
                setattr(parent, name, PackedLinear(layer))
    return model.requires_grad_(False)
