"""U-Net is encoders, a bottleneck and decoders, and what each encoder sees reaches its decoder."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import unet
from tests.benchmarks.models import children, make


def test_values():
    model, input = make("unet")
    layers = children(model)

    def stack(name, x):
        for k in (1, 2):
            x = F.conv2d(x, layers[f"{name}_conv{k}"].weight, padding=1)
            x = F.leaky_relu(F.instance_norm(x), 0.01)
        return x

    fine = stack("encoder1", input)
    coarse = stack("encoder2", F.max_pool2d(fine, 2))
    x = stack("bottleneck", F.max_pool2d(coarse, 2))
    for name, skip in (("decoder2", coarse), ("decoder1", fine)):
        x = stack(name, torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))
    expected = F.conv2d(x, layers["output"].weight)
    assert expected.shape == (4, 1, 16, 12)
    torch.testing.assert_close(model(input), expected)


def test_channels():
    model = unet(depth=2, num_convs=3, base_channels=4, input_channels=1, output_channels=5)
    found = [(x.in_channels, x.out_channels) for x in model if isinstance(x, nn.Conv2d)]
    assert found == [
        *((1, 4), (4, 4), (4, 4)),
        *((4, 8), (8, 8), (8, 8)),
        *((8, 16), (16, 16), (16, 8)),
        *((16, 4), (4, 4), (4, 4)),
        *((8, 2), (2, 2), (2, 2)),
        (2, 5),
    ]


def test_one_convolution():
    model = unet(depth=1, num_convs=1, base_channels=2)
    assert model(torch.rand(1, 3, 4, 4)).shape == (1, 1, 4, 4)


def test_errors():
    with pytest.raises(ValueError, match=r"\(depth: 0, num_convs: 1\)"):
        unet(0, 1, 2)
    with pytest.raises(ValueError, match=r"\(depth: 1, num_convs: 0\)"):
        unet(1, 0, 2)
    with pytest.raises(ValueError, match=r"\(base_channels: 3\)"):
        unet(1, 1, 3)
