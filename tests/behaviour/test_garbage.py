"""Garbage: a step leaves nothing to Python's collector, and ``del`` frees a wrapper at once.

A user who turns the collector off, as trainers of large models do, would run out of memory.
"""

import ast
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe
from tests.contract import memory
from torchgpipe import GPipe, MappedGPipe, NoChunk, PerMicroBatch, ScheduledLoss
from torchgpipe.skip import pop, skippable, stash

MODES = ["never", "except_last", "always"]
DEVICES = ["cpu", "cpu"]


@pytest.fixture
def uncollected():
    with memory.uncollected() as collect:
        yield collect


class Values(nn.Module):
    """A layer that takes a value of several containers, and returns another one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value):
        x = self.linear(value["x"]) * value["rest"][1]
        return {"x": x, "rest": [None, value["rest"][1]]}


class Last(nn.Module):
    def __init__(self, marked):
        super().__init__()
        self.linear, self.marked = nn.Linear(4, 4), marked

    def forward(self, value):
        x = self.linear(value["x"])
        return (x, PerMicroBatch(x.mean())) if self.marked else x


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, value):
        yield stash("skip", value["x"] * 2)
        return value


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, value):
        skip = yield pop("skip")
        return {**value, "x": value["x"] + skip}


class Model(nn.Module):
    """A model that comes back to a device, with code between its modules."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = Values(), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x, rest):
        value = self.first({"x": x, "rest": rest})
        return {"x": self.last(self.middle(value["x"])), "losses": [value["x"].mean()]}


def value():
    return {"x": torch.rand(8, 4), "rest": [None, NoChunk(torch.rand(4))]}


def gpipe(mode):
    sequence = nn.Sequential(Values(), Stash(), Pop(), Last(True))
    model = GPipe(sequence, [2, 2], devices=DEVICES, chunks=2, checkpoint=mode)

    def step():
        output, means = model(value())
        return output.sum() + means.sum()

    return model, step


def scheduled(mode):
    sequence = nn.Sequential(Values(), Stash(), Pop(), Last(False))
    model = GPipe(sequence, [2, 2], devices=DEVICES, chunks=2, checkpoint=mode)
    loss = ScheduledLoss(model, weighted, outputs=True)
    return loss, lambda: loss(value(), torch.rand(8, 4), weights=[torch.rand(8, 1)])[0]


def weighted(output, target, weights):
    return (F.mse_loss(output, target, reduction="none") * weights[0]).mean()


def mapped(mode, **kwargs):
    places = {"first": "cpu", "middle": "cpu", "last": "cpu"}
    model = MappedGPipe(Model(), places, chunks=2, checkpoint=mode, **kwargs)

    def step():
        output = model(torch.rand(8, 4), rest=(None, torch.rand(8, 4)))
        return output["x"].sum() + output["losses"][0].sum()

    return model, step


WRAPPERS = {
    "GPipe": gpipe,
    "ScheduledLoss": scheduled,
    "MappedGPipe": mapped,
    "MappedGPipe, threads": lambda mode: mapped(mode, threads=2),
}


def run(step, training):
    if training:
        step().backward()
    else:
        with torch.no_grad():
            step()


def alive(model):
    """Weak references to a wrapper, and to all that it computes with."""
    return [weakref.ref(x) for x in (model, *model.modules(), *model.parameters())]


@pytest.mark.parametrize("training", [True, False], ids=["training", "forward"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_leaves_nothing_to_the_collector(wrapper, mode, training, uncollected):
    model, step = WRAPPERS[wrapper](mode)
    model.train(training)
    assert uncollected() == 0
    for _ in range(2):
        # PyTorch imports what it needs.
        run(step, training)
    uncollected()
    run(step, training)
    assert uncollected() == 0


@pytest.mark.parametrize("training", [True, False], ids=["training", "forward"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_del_frees_a_wrapper_at_once(wrapper, training, uncollected):
    """Nothing that was traced, learned or compiled in its steps keeps it."""
    model, step = WRAPPERS[wrapper]("except_last")
    model.train(training)
    for _ in range(3):
        run(step, training)
    references = alive(model)
    del model, step
    assert [x() for x in references if x() is not None] == []


def test_a_model_without_its_wrapper_is_free(uncollected):
    model = Model()
    pipe = MappedGPipe(model, {"": "cpu"}, chunks=2)
    pipe(torch.rand(8, 4), rest=(None, torch.rand(8, 4)))["x"].sum().backward()
    wrapper, references = weakref.ref(pipe), alive(model)
    del pipe
    assert wrapper() is None
    # What it was wrapped for still works.
    model(torch.rand(8, 4), rest=(None, torch.rand(8, 4)))
    del model
    assert [x() for x in references if x() is not None] == []


def test_a_module_that_the_model_has_no_more_stays_in_its_map(uncollected):
    pipe = MappedGPipe(Model(), {"first": "cpu", "middle": "cpu", "last": "cpu"})
    pipe.module.middle = nn.Identity()
    assert pipe(torch.rand(8, 4), rest=(None, torch.rand(8, 4)))["x"].shape == (8, 4)
    assert "middle" in str(pipe.describe())


def test_no_function_within_a_function_refers_to_itself():
    """Such a function, and all that it refers to, is freed by the collector alone."""
    package = Path(torchgpipe.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
        for outer in functions:
            # A method sees its class's names by the class alone.
            for inner in ast.walk(outer):
                if inner is not outer and isinstance(inner, ast.FunctionDef):
                    used = {x.id for x in ast.walk(inner) if isinstance(x, ast.Name)}
                    if inner.name in used:
                        found.append(f"{path.relative_to(package)}: {inner.name}")
    assert found == []
