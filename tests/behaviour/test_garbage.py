"""Garbage: a map lets go of its model, and no function refers to itself.

``tests/contract`` has what a step leaves. A user who turns the collector off, as trainers of large
models do, would run out of memory.
"""

import ast
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.contract import memory
from tests.support.sources import FILES, PACKAGE, nodes, tree
from torchgpipe import MappedGPipe


@pytest.fixture
def uncollected():
    with memory.uncollected() as collect:
        yield collect


def model_of():
    layers = {"first": nn.Linear(4, 4), "middle": nn.BatchNorm1d(4), "last": nn.Linear(4, 4)}
    return nn.Sequential(OrderedDict(layers))


def test_a_model_without_its_wrapper_is_free(uncollected):
    model = model_of()
    pipe = MappedGPipe(model, {"": "cpu"}, chunks=2)
    pipe(torch.rand(8, 4)).sum().backward()
    wrapper = weakref.ref(pipe)
    references = [weakref.ref(x) for x in (*model.modules(), *model.parameters())]
    del pipe
    assert wrapper() is None
    # What it was wrapped for still works.
    model(torch.rand(8, 4))
    del model
    assert [x() for x in references if x() is not None] == []


def test_a_module_that_the_model_has_no_more_stays_in_its_map(uncollected):
    pipe = MappedGPipe(model_of(), {"first": "cpu", "middle": "cpu", "last": "cpu"})
    pipe.module.middle = nn.Identity()
    assert pipe(torch.rand(8, 4)).shape == (8, 4)
    assert "middle" in str(pipe.describe())


def test_no_function_within_a_function_refers_to_itself():
    """Such a function, and all that it refers to, is freed by the collector alone."""
    found = []
    for path in FILES:
        functions = [x for x in nodes(tree(path)) if isinstance(x, ast.FunctionDef)]
        for outer in functions:
            # A method sees its class's names by the class alone.
            for inner in functions:
                if outer.lineno < inner.lineno <= outer.end_lineno:
                    used = {x.id for x in ast.walk(inner) if isinstance(x, ast.Name)}
                    if inner.name in used:
                        found.append(f"{path.relative_to(PACKAGE)}: {inner.name}")
    assert found == []
