"""Parts may be compiled, each on its own."""

import copy
from threading import get_ident

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import assert_graphs
from tests.support.size import some
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.graphs.gate import gate


def training_of(layers, mode="never", **options):
    model = GPipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    return ScheduledLoss(model, F.mse_loss, "zbh1", stages="graph", **options)


@pytest.mark.parametrize("mode", some(["never", "always"], ["always"]))
def test_compiled_parts_compute_the_same(mode):
    torch.manual_seed(0)
    made = []

    def backend(module, inputs):
        made.append([x for x in module.graph.nodes if x.op == "call_function"])
        return module.forward

    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3)) for _ in range(2)]
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    found = []
    for options in ({}, {"compile": backend}):
        training = training_of(copy.deepcopy(layers), mode, **options)
        for _ in range(2):
            training(x, y).backward()
        found.append([p.grad for p in training.parameters()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)
    # F, I and W of each stage, I of the first one being empty; R, too.
    assert len(made) == {"never": 5, "always": 7}[mode]
    assert all(made)


@pytest.mark.parametrize("mode", some(["never", "always"], ["always"]))
def test_compiled_norms(mode):
    """Running statistics change as those of PyTorch's own norms do, which count no change."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    x, y = torch.rand(6, 3), torch.rand(6, 3)
    found = []
    for options in ({}, {"compile": "aot_eager"}):
        training = training_of(copy.deepcopy(layers), mode, **options)
        for _ in range(2):
            training(x, y).backward()
        found.append([*[p.grad for p in training.parameters()], *training.buffers()])
    assert_graphs(training)
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_stages_that_are_traced_while_others_run_what_is_compiled():
    """On the CPU each stage has a thread, and the compiler knows of one at a time."""
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)) for _ in range(3)]
    model = GPipe(nn.Sequential(*layers), [1] * 3, devices=["cpu"] * 3, chunks=3)
    training = ScheduledLoss(model, F.mse_loss, "zbh1", stages="graph", compile="aot_eager")
    x = torch.rand(8, 3)
    for eps in range(2):
        layers[eps][1].eps = eps
        training(x, x).backward()
    assert_graphs(training)


def test_compiled_alone():
    """While PyTorch's compiler traces, it refuses to run compiled code in other threads."""
    alone = []

    def backend(module, _):
        alone.append(gate.tracer == get_ident())
        return module.forward

    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2)
    training = ScheduledLoss(model, F.mse_loss, "1f1b", stages="graph", compile=backend)
    x = torch.rand(8, 3)
    for _ in range(3):
        training(x, x).backward()
    assert len(alone) == 4
    assert all(alone)


def test_eager_stages_are_not_compiled():
    with pytest.raises(ValueError, match="stages='graph'"):
        ScheduledLoss(training_of([nn.Linear(3, 3)] * 2).model, F.mse_loss, compile="inductor")


def test_choices_of_recomputation():
    model = training_of([nn.Linear(3, 3)] * 2).model
    with pytest.raises(ValueError, match="min-cut"):
        ScheduledLoss(model, F.mse_loss, stages="graph", recompute="all")
    with pytest.raises(ValueError, match="stages='graph'"):
        ScheduledLoss(model, F.mse_loss, recompute="min-cut")
