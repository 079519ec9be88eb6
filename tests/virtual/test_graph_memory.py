"""The memory that graphs are said to take is what the allocator counts, to the byte."""

import gc

import pytest
import torch
from torch import nn

from tests.support.graphs import Stage, kept, peak
from tests.virtual.stages import squares
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.engine.loop import Executor
from torchgpipe.engine.workers import Workers
from torchgpipe.schedule import validate
from torchgpipe.schedule.costs import Table

WIDTH, ROWS = 64, 4


STAGES = {
    "linear": lambda: (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (8, 64)),
    "convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)
        ),
        (4, 2, 9, 9),
    ),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh()), (3, 5)),
}


def allocated(device):
    gc.collect()
    return torch.accelerator.memory_allocated(device)


def run(part, values, device):
    """The results of a part, and the most memory that was taken meanwhile."""
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    with torch.no_grad():
        found = part.function(values)
    return found, torch.accelerator.max_memory_allocated(device)


@pytest.mark.parametrize("name", STAGES)
def test_each_part(devices, name):
    device = devices[0]
    layers, shape = STAGES[name]()
    layers.to(device)

    def input():
        if name == "embedding":
            return torch.randint(9, shape, device=device)
        return torch.rand(shape, device=device)

    needs_grad = name != "embedding"
    stage = Stage(layers, input().requires_grad_(needs_grad))
    parts, late = stage.parts, stage.parts.weight
    stage.x = None
    state = stage.places.read()
    before = allocated(device)
    values = parts.forward.arguments({"state": state, "input": [input()], "more": []})
    found, most = run(parts.forward, values, device)
    assert most - before == peak(parts, parts.forward)
    tangents = [torch.rand_like(x) for x in found[: stage.count]]
    saved = found[stage.count :]
    del found
    grads = sum(x.nbytes for x in tangents)
    assert allocated(device) - before - grads == kept(parts).activation
    given = {"state": state, "saved": saved, "tangent": tangents}
    rest = [None if role == "live" else given[role][k] for role, k in late.sources]
    values = parts.input.arguments(given)
    del given, saved, tangents
    found, most = run(parts.input, values, device)
    assert most - before == peak(parts, parts.input, late.slice.inputs)
    for place, (role, k) in enumerate(late.sources):
        if role == "live":
            rest[place] = found[len(parts.joint.input_grads) + k]
    del found
    assert allocated(device) - before == kept(parts).pending
    _, most = run(late, rest, device)
    assert most - before == peak(parts, late)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_schedule(devices, mode, monkeypatch):
    """Costs that are counted before a step has run tell what 1F1B takes."""
    n, m = 4, 6
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        for _ in range(n)
    ]
    model = GPipe(nn.Sequential(*layers), [1] * n, devices=devices[:n], chunks=m, checkpoint=mode)
    training = ScheduledLoss(model, squares, "1f1b", stages="graph")
    x = torch.rand(m * ROWS, WIDTH, device=devices[0])
    y = torch.rand(m * ROWS, WIDTH, device=devices[n - 1])
    costs = training.costs(x, y)
    schedule = training._plan(m, forward=False).schedule
    table = Table(costs, schedule.placement)
    static = [max(table.held(line)) for line in schedule.program]
    assert validate(schedule, static, costs) == []
    assert len(validate(schedule, [x - 1 for x in static], costs)) == n
    training(x, y)
    before = [allocated(device) for device in devices[:n]]
    seen = [[] for _ in range(n)]
    perform = Executor.perform

    def measured(self, w, instruction):
        perform(self, w, instruction)
        seen[w].append(torch.accelerator.memory_allocated(devices[w]) - before[w])

    monkeypatch.setattr(Executor, "perform", measured)
    # Threads would decide how many messages are on their way.
    monkeypatch.setattr(Workers, "_way", lambda _: "caller")
    training(x, y)
    grads = sum(p.nbytes for p in layers[0].parameters())
    message = ROWS * WIDTH * 4
    for w in range(1, n):
        # The next input has arrived already; the last worker has losses instead.
        arrived = message if w < n - 1 else 4 * m
        assert max(seen[w]) == static[w] + grads + arrived
