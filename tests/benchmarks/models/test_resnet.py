"""The flat ResNet is the usual one: in the names and the shapes of its weights, and in values."""

import hashlib

import pytest
import torch
from torch import nn

from benchmarks.models import resnet, resnet101, usual_name
from tests.benchmarks.models import count, make

#: Of the lines ``name (shape)`` of the state_dict of torchvision 0.29.2's ResNet-101.
TORCHVISION = "0e9191dd134cb07d7d14b0502545020b49f200c87fa62369fd7a6c70ca9c2aef"


def norm(name, channels):
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (channels,)
    yield f"{name}.num_batches_tracked", ()


def table():
    """Names and shapes, from table 1 of the paper."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    inputs = 64
    stages = [(64, 256, 3), (128, 512, 4), (256, 1024, 23), (512, 2048, 3)]
    for stage, (inner, outer, blocks) in enumerate(stages, start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield f"{name}.conv1.weight", (inner, inputs, 1, 1)
            yield from norm(f"{name}.bn1", inner)
            yield f"{name}.conv2.weight", (inner, inner, 3, 3)
            yield from norm(f"{name}.bn2", inner)
            yield f"{name}.conv3.weight", (outer, inner, 1, 1)
            yield from norm(f"{name}.bn3", outer)
            if block == 0:
                yield f"{name}.downsample.0.weight", (outer, inputs, 1, 1)
                yield from norm(f"{name}.downsample.1", outer)
            inputs = outer
    yield "fc.weight", (1000, 2048)
    yield "fc.bias", (1000,)


@pytest.fixture(scope="module")
def state():
    """State of ResNet-101, without memory."""
    with torch.device("meta"):
        model = resnet101()
    assert count(model) == 44_549_160
    return model.state_dict()


def test_state_dict_is_the_table(state):
    assert [(usual_name(key), tuple(x.shape)) for key, x in state.items()] == [*table()]


def test_state_dict_is_that_of_torchvision(state):
    lines = "".join(f"{usual_name(key)} {tuple(x.shape)}\n" for key, x in state.items())
    assert hashlib.sha256(lines.encode()).hexdigest() == TORCHVISION


class Block(nn.Module):
    """A residual block in its usual form."""

    def __init__(self, inputs, inner, stride):
        super().__init__()
        outer = 4 * inner
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.downsample = nn.Sequential()
        if inputs != outer or stride != 1:
            convolution = nn.Conv2d(inputs, outer, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outer))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.downsample(x) + self.bn3(self.conv3(y))).relu()


class Ordinary(nn.Module):
    """A ResNet of one, two, one and one blocks, of 2 channels, for 10 classes."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 2, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(2)
        self.layer1 = nn.Sequential(Block(2, 2, 1))
        self.layer2 = nn.Sequential(Block(8, 4, 2), Block(16, 4, 1))
        self.layer3 = nn.Sequential(Block(16, 8, 2))
        self.layer4 = nn.Sequential(Block(32, 16, 2))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def test_values_are_those_of_an_ordinary_one():
    flat, input = make("resnet")
    ordinary = Ordinary().double()
    ordinary.load_state_dict({usual_name(key): x for key, x in flat.state_dict().items()})
    output, expected = flat(input), ordinary(input)
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    theirs = dict(ordinary.named_parameters())
    for name, parameter in flat.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.pop(usual_name(name)).grad, msg=name)
    assert not theirs
    found = {usual_name(key): x for key, x in flat.state_dict().items()}
    torch.testing.assert_close(found, dict(ordinary.state_dict()))


def test_small_images_are_enough():
    assert resnet([1, 1, 1, 1], 10, width=4)(torch.rand(2, 3, 8, 8)).shape == (2, 10)


def test_usual_name():
    assert usual_name("layer3_22_conv1.weight") == "layer3.22.conv1.weight"
    assert usual_name("layer1_0_downsample.0.weight") == "layer1.0.downsample.0.weight"
    assert usual_name("conv1.weight") == "conv1.weight"
