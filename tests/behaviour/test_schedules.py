"""Any schedule computes what the micro-batches give one after another."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.helpers import MODES
from tests.support.schedules import CASES, NAMES, Case, compare
from torchgpipe.autograd import outcome


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_buffers(case, name, mode):
    torch.manual_seed(0)
    compare(CASES[case](), name, ["cpu"] * 4, mode)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_added_at_once(monkeypatch, case, name):
    """Gradients of all sizes are added as soon as they are there, as large ones are."""
    monkeypatch.setattr(outcome, "LARGE", 0)
    model = compare(CASES[case](), name, ["cpu"] * 4, "except_last").model
    assert not any(x._backward_hooks for x in model.parameters())


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
