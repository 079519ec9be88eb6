"""The papers' models, at tiny size and without memory."""

import torch

from benchmarks.models import amoebanetd, gpt, resnet, unet


def tiny():
    """A small model of each kind and an input of four rows, by name."""
    return {
        "amoebanetd": (amoebanetd(10, num_layers=3, num_filters=8), torch.rand(4, 3, 33, 40)),
        "unet": (unet(2, num_convs=2, base_channels=4, dropout=0.0), torch.rand(4, 3, 16, 12)),
        "resnet": (resnet([1, 2, 1, 1], 10, width=2), torch.rand(4, 3, 32, 24)),
        "gpt": (gpt(11, 8, layers=2, width=8, heads=2), torch.randint(11, (4, 6))),
    }


NAMES = ("amoebanetd", "unet", "resnet", "gpt")


def make(name):
    """One of these models in double precision, and its input."""
    model, input = tiny()[name]
    return model.double(), input.double() if input.is_floating_point() else input


def count(model):
    """Number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def children(model):
    """The layers of a flat model, by name."""
    return dict(model.named_children())
