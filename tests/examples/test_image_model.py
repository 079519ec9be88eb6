"""ResNets of timm and torchvision compute under GPipe what they compute alone."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.examples import BROKEN
from torchgpipe import GPipe

pytest.importorskip("timm", exc_type=BROKEN)
pytest.importorskip("torchvision", exc_type=BROKEN)

import timm
import torchvision

from examples import image_model


def inner(model):
    """The layers of torchvision's model, which flattens between two of them."""
    children = OrderedDict(model.named_children())
    head = children.pop("fc")
    return nn.Sequential(OrderedDict(children, flatten=nn.Flatten(), fc=head))


@pytest.mark.parametrize("name", ["resnet26d", "torchvision"])
def test_parity(name):
    torch.manual_seed(1)
    if name == "torchvision":
        plain, sequential = torchvision.models.resnet18(weights=None), inner
    else:
        plain, sequential = timm.create_model(name, pretrained=False), image_model.sequential
    plain = plain.double()
    layers = sequential(copy.deepcopy(plain))
    assert list(layers.state_dict()) == list(plain.state_dict())
    model = GPipe(layers, [5, len(layers) - 5], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    x = torch.rand(4, 3, 32, 32, dtype=torch.double)
    output = model(x)
    expected = torch.cat([plain(part) for part in x.chunk(2)])
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    for (key, mine), theirs in zip(model.module.named_parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=key)
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())
    model.eval(), plain.eval()
    torch.testing.assert_close(model(x), plain(x))


def test_main(capsys):
    assert image_model.main(["--epochs", "2", "--rows", "70", "--chunks", "16"]) == 0
    assert "Both learnt the same" in capsys.readouterr().out
