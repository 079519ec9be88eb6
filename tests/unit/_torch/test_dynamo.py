"""The bounds of the compiler: settings and marks, and when they come."""

import contextvars
import sys

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.autograd import graph

from tests.support import fresh
from tests.support.size import some
from torchgpipe import GPipe, _torch
from torchgpipe._torch import dynamo

# The compiler reads the gradient of every input, also of one that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


#: Whether this PyTorch keeps the context of backward's caller.
EXCHANGED = hasattr(graph, "contextvars")


@pytest.fixture
def told(monkeypatch):
    """A list of the calls that set the order of graphs, in a process that has made none yet."""
    told = []
    torch._dynamo.reset()
    monkeypatch.setattr(dynamo._preparation, "done", False)
    if EXCHANGED:
        monkeypatch.setattr(graph, "contextvars", contextvars)
    monkeypatch.setitem(vars(_torch), "set_lru_cache", told.append)
    yield told
    torch._dynamo.reset()


class Calls(nn.Module):
    """A layer that calls a function of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.function(self.linear(x))


def step(*layers):
    model = GPipe(nn.Sequential(*layers), [len(layers)], devices=["cpu"], chunks=2)
    model(torch.ones(4, 2)).sum().backward()


def test_what_was_compiled_before_is_prepared_for(told):
    """Layers may call compiled functions, which nobody sees."""
    compiled = torch.compile(torch.sin, backend="eager")
    compiled(torch.ones(2))
    assert told == []
    step(Calls(compiled))
    assert told == [False]


def test_compiler_that_is_loaded_in_a_cell_is_prepared_for(told, monkeypatch):
    modules = dict(sys.modules)
    del modules["torch._dynamo"]
    monkeypatch.setattr(dynamo.sys, "modules", modules)

    def load(x):
        monkeypatch.undo()
        monkeypatch.setattr(dynamo._preparation, "done", False)
        monkeypatch.setitem(vars(_torch), "set_lru_cache", told.append)
        return torch.compile(torch.sin, backend="eager")(x)

    model = GPipe(nn.Sequential(Calls(load)), [1], devices=["cpu"])
    model(torch.ones(1, 2))
    assert told == [False]


@pytest.mark.parametrize("mode", some(["never", "always"], ["always"]))
def test_wrapper_that_is_compiled_first_thing(mode):
    """The compiler meets the wrapper before the wrapper has run."""
    program = f"""
from pathlib import Path
import torch
import torchgpipe
from torch import nn
from torchgpipe import GPipe
from torch._dynamo.convert_frame import input_codes
layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint={mode!r})
torch.compile(model, backend="eager")(torch.ones(4, 2)).sum().backward()
package = Path(torchgpipe.__file__).parent
codes = [code() for code in input_codes.seen]
print([x.co_name for x in codes if Path(x.co_filename).is_relative_to(package)])
"""
    assert fresh.run(program)[:2] == (0, "[]\n")


@pytest.mark.parametrize("way", ["wrapped", "in place", "a function"])
def test_compiled_layers_are_prepared_for_once(told, way):
    layer = nn.Linear(2, 2)
    if way == "wrapped":
        layer = torch.compile(layer, backend="eager")
    elif way == "in place":
        layer.compile(backend="eager")
    else:
        layer = Calls(torch.compile(torch.sin, backend="eager"))
    GPipe(nn.Sequential(layer), [1], devices=["cpu"])
    assert told == []
    for _ in range(2):
        step(layer)
    assert told == [False]
    assert hasattr(graph, "contextvars") == EXCHANGED
    assert not EXCHANGED or graph.contextvars is dynamo._copied


def test_a_context_that_pytorch_copies_needs_no_stand_in(told, monkeypatch):
    """A number of a version does not tell whether there must be a stand-in."""
    monkeypatch.setattr(graph, "contextvars", dynamo._copied, raising=False)
    variable = contextvars.ContextVar("variable", default=0)
    context = dynamo._copied.copy_context()
    variable.set(1)
    assert context.run(variable.get) == 0
    assert graph.contextvars is dynamo._copied
    assert context.copy().run(variable.get) == 0
    assert graph.contextvars is contextvars


@pytest.mark.skipif(not EXCHANGED, reason="this PyTorch keeps no context")
def test_canary_of_contexts(told, monkeypatch):
    """Compiled code in backward enters the caller's context, or a copy of it, and nothing else."""
    used = []

    class Context(dynamo._Context):
        def run(self, *args, **kwargs):
            used.append("run")
            return super().run(*args, **kwargs)

        def copy(self):
            used.append("copy")
            return super().copy()

    monkeypatch.setattr(dynamo._copied, "copy_context", Context)
    step(torch.compile(nn.Linear(2, 2), backend="aot_eager"))
    assert set(used) in ({"run"}, {"copy"})
    assert (graph.contextvars is contextvars) == ("copy" in used)


def test_functions_are_marked_when_the_compiler_may_meet_them(monkeypatch):
    marked = []
    monkeypatch.setitem(vars(_torch), "set_code_strategy", lambda code, _: marked.append(code))

    @dynamo.uncompiled
    def function():
        return 1

    assert function._torchdynamo_disable
    step(nn.Linear(2, 2))
    assert function.__code__ in marked
