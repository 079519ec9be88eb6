"""Compiled layers refuse a retained graph, and are right under any schedule all the same."""

import copy
from unittest import TestCase

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.autograd.halves import _say_whole

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

LENGTH = 16


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Begin without compiled code, and let FlexAttention run backward on the CPU.

    It refuses to, since PyTorch has no compiled backward for the CPU. The backend of these tests
    runs PyTorch's own formula of the backward, which the CPU has.
    """
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda query, key, value: None
    )
    torch._dynamo.reset()
    _say_whole.cache_clear()
    yield
    torch._dynamo.reset()


def causal(batch, head, query, key):
    return query >= key


def bias(score, batch, head, query, key):
    return score + 0.1 * (key - query)


class Flex(nn.Module):
    """Causal self-attention with a bias, by FlexAttention, or by a formula."""

    def __init__(self, attend):
        super().__init__()
        self.inputs, self.output, self.attend = nn.Linear(8, 24), nn.Linear(8, 8), attend

    def forward(self, x):
        inputs = self.inputs(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return x + self.output(self.attend(*inputs).transpose(1, 2).flatten(2))


def formula(query, key, value):
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    mask = (0.1 * distance).masked_fill(distance > 0, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, mask)


def flex():
    """Layers with compiled FlexAttention, the same by a formula, an input and a target."""
    compiled = torch.compile(flex_attention, backend="aot_eager")
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")

    def attend(*inputs):
        return compiled(*inputs, score_mod=bias, block_mask=mask)

    layers = [Flex(attend) for _ in range(4)]
    plain = nn.Sequential(*[Flex(formula) for _ in range(4)])
    plain.load_state_dict(nn.Sequential(*layers).state_dict())
    return layers, plain, torch.rand(8, LENGTH, 8), torch.rand(8, LENGTH, 8)


def whole():
    """Layers that are compiled as a whole, the same without, an input and a target."""
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    layers = [torch.compile(block, backend="aot_eager") for block in blocks]
    return layers, plain, torch.rand(8, 6), torch.rand(8, 6)


@pytest.mark.parametrize(("kind", "mode"), [(whole, "always"), (flex, "except_last")])
def test_gradients(kind, mode):
    """Compiled layers run their whole backward at I, which a debug message says once."""
    torch.manual_seed(0)
    layers, plain, x, y = kind()
    F.mse_loss(plain(x), y).backward()
    # The first backward of a compiled layer decides that it frees what it has saved.
    layers[0](x).sum().backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        torch.autograd.grad(layers[0](x).sum(), [*layers[0].parameters()], retain_graph=True)
    model = GPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * 4, chunks=4, checkpoint=mode)
    training = ScheduledLoss(model, F.mse_loss)
    with TestCase().assertLogs("torchgpipe", "DEBUG") as seen:
        for name in ("zbh1", "zbv"):
            training.schedule = name
            training.zero_grad()
            training(x, y).backward()
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own.grad, other.grad)
    messages = [x.getMessage() for x in seen.records if x.name.endswith("halves")]
    assert messages == [
        "cells with compiled layers, or with PyTorch's checkpoints, run their whole backward at I, "
        "and leave W nothing"
    ]
