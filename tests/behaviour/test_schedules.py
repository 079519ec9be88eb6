"""Any schedule computes what the micro-batches give one after another."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.support.helpers import MODES
from tests.support.schedules import CASES, NAMES, Case, compare
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.autograd.halves import _say_compiled


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_buffers(case, name, mode):
    torch.manual_seed(0)
    compare(CASES[case](), name, ["cpu"] * 4, mode)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_that_refuse_a_retained_graph(mode, caplog):
    """Compiled layers run their whole backward at I, which a debug message says once."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    _say_compiled.cache_clear()
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    layers = [torch.compile(block, backend="aot_eager") for block in blocks]
    x, y = torch.rand(8, 6), torch.rand(8, 6)
    F.mse_loss(plain(x), y).backward()
    # The first backward of a compiled layer decides that it frees what it has saved.
    layers[0](x).sum().backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        torch.autograd.grad(layers[0](x).sum(), [*blocks[0].parameters()], retain_graph=True)
    model = GPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * 4, chunks=4, checkpoint=mode)
    training = ScheduledLoss(model, F.mse_loss)
    with caplog.at_level("DEBUG", logger="torchgpipe"):
        for name in ("1f1b", "zbh1", "zbv", "zbv"):
            training.schedule = name
            training.zero_grad()
            training(x, y).backward()
            for own, other in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(own.grad, other.grad)
    messages = [x.message for x in caplog.records if x.name.endswith("halves")]
    assert messages == [
        "cells with compiled layers run their whole backward at I, and leave W nothing"
    ]
    torch._dynamo.reset()


class Recomputed(nn.Module):
    """A layer with a checkpoint of PyTorch within it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_of_pytorch_within_layers(name, mode):
    torch.manual_seed(0)
    x, y = torch.rand(8, 6), torch.rand(8, 6)
    layers = [Recomputed() for _ in range(4)]
    compare(Case(layers, x, y), name, ["cpu"] * 4, mode)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_hooks_for_saved_tensors(name):
    """Hooks of the caller pack what the layers save."""
    torch.manual_seed(0)
    case = CASES["mlp"]()
    with torch.autograd.graph.save_on_cpu():
        compare(case, name, ["cpu"] * 4, "never")
