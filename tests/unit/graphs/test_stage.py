"""The graphs of a stage: one for each kind of micro-batch, and each state of the layers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.graphs import traced_in
from torchgpipe import GPipe, ScheduledLoss, arguments


def training_of(*layers, loss=F.mse_loss, chunks=2, schedule="1f1b", **options):
    model = GPipe(
        nn.Sequential(*layers),
        [1] * len(layers),
        devices=["cpu"] * len(layers),
        chunks=chunks,
        checkpoint="never",
    )
    return ScheduledLoss(model, loss, schedule, stages="graph", **options)


def graphs_of(training):
    return training.graphs[0]


def traces(graphs):
    return sum(len(traced_in(state)) for state in graphs.states)


def step(training, rows=4, size=3, dtype=torch.float32):
    x = torch.rand(rows, size, dtype=dtype)
    training(x, x).backward()


def test_graphs_are_used_again():
    training = training_of(nn.Linear(3, 3), nn.Linear(3, 3))
    step(training)
    step(training)
    graphs = graphs_of(training)
    assert traces(graphs) == 1
    step(training, rows=5)
    # The layers run on each kind of micro-batch before they are traced on it.
    assert traces(graphs) == 1
    step(training, rows=5)
    assert traces(graphs) == 2
    step(training)
    assert traces(graphs) == 2
    assert not graphs.reasons


def test_states_of_the_layers():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    training = training_of(layer)
    for _ in range(2):
        training.train()
        step(training)
        training.eval()
        x = torch.rand(4, 3)
        training(x, x)
    graphs = graphs_of(training)
    assert traces(graphs) == 2
    training.train()
    layer[1].p = 0.0
    step(training)
    assert traces(graphs) == 3


def test_values_that_are_no_tensors_belong_to_the_kind():
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    training = training_of(Scaled())
    x = torch.ones(4, 3)
    training.eval()
    assert training(arguments(x, 2.0), x) == 1
    assert training(arguments(x, 3.0), x) == 4


def test_what_cannot_be_a_graph_is_said_once():
    class Value(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() > -9 else x

    training = training_of(nn.Linear(3, 3), Value())
    with pytest.warns(UserWarning, match=r"stage 1 is not.*stages='eager'") as warned:
        step(training)
    assert len(warned) == 1
    step(training)
    (reason,) = training.graphs[1].reasons
    assert "depends on the values" in reason
    assert not training.graphs[0].reasons


def test_attributes_that_are_others_in_each_step():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    training = training_of(layer)

    def anneal(steps):
        for k in steps:
            layer[1].p = k / 100
            step(training)

    anneal(range(8))
    with pytest.warns(UserWarning, match=r"others in each step \(Dropout.p\)") as warned:
        anneal(range(8, 14))
    assert len(warned) == 1
    graphs = graphs_of(training)
    assert traces(graphs) == 2
    # Once they stay, there are graphs again.
    step(training)
    assert traces(graphs) == 3


def test_settings_belong_to_the_kind():
    training = training_of(nn.Linear(3, 3))
    step(training)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        step(training)
        assert traces(graphs_of(training)) == 2
    step(training)
    assert traces(graphs_of(training)) == 2


def test_steps_in_two_threads():
    """Each has its own settings, and the graphs that belong to them."""
    torch.manual_seed(0)
    training = training_of(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    x = torch.rand(4, 3)
    expected = {}

    def loss(half):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            return training(x, x).item()

    for half in (False, True):
        expected[half] = loss(half)
    assert expected[False] != expected[True]
    with ThreadPoolExecutor(2) as pool:
        kinds = [k % 2 == 0 for k in range(40)]
        assert [*pool.map(loss, kinds)] == [expected[half] for half in kinds]


def test_kinds_are_not_without_end(monkeypatch):
    monkeypatch.setattr("torchgpipe.graphs.stage.KINDS", 4)
    training = training_of(nn.Linear(3, 3), loss=lambda a, b, c: F.mse_loss(a, b) * c)
    x = torch.rand(4, 3)
    for k in range(4):
        training(x, x, float(k))
    with pytest.warns(UserWarning, match="more than 4 kinds"):
        training(x, x, 5.0)
    training(x, x, 6.0)
    assert traces(graphs_of(training)) == 4


def test_listings(capsys):
    training = training_of(nn.Linear(3, 3), nn.Linear(3, 3))
    training.costs(torch.rand(4, 3), torch.rand(4, 3))
    graphs = training.graphs[1]
    graphs.print()
    assert "stage 1" in capsys.readouterr().out
    graphs.last = None
    with pytest.raises(ValueError, match="once a step"):
        graphs.print()
