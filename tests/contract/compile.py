"""``torch.compile``."""

import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import torchgpipe
from tests.contract.promises import promise
from tests.contract.wrapped import trained


class Block(nn.Module):
    """A layer that saves more for backward than its input and its weights."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(F.gelu(self.linear(x))) + x


@contextmanager
def compiling():
    """A backend that counts its graphs; nothing is compiled before or left behind."""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            # The compiler reads the gradient of every input, also of one that is no leaf.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield CompileCounterWithBackend("eager")
    finally:
        torch._dynamo.reset()


@promise(
    "Layers of ``torch.compile(layer)`` compute what plain layers do, compiled no more often.",
    modes=True,
    eager=True,
)
def compiled_layers(make):
    with compiling() as backend:
        one, other = [torch.compile(Block(), backend=backend) for _ in range(2)]
        layers = nn.Sequential(nn.Linear(6, 6), one, nn.Linear(6, 6), other)
        model = make(layers)
        trained(model, layers)
        # Both have one graph, in each process.
        assert sum(model.all([backend.frame_count])) <= 2


@promise("Layers may be compiled in place, also after wrapping.", modes=True, eager=True)
def compiled_in_place(make):
    with compiling() as backend:
        layers = nn.Sequential(*[Block() for _ in range(2)])
        model = make(layers)
        trained(model, layers, (8,))
        for layer in model.layers:
            layer.compile(backend=backend)
        trained(model, layers)
        assert sum(model.all([backend.frame_count])) > 0


@promise(
    "``torch.compile`` of a training step compiles the code around the wrapper, and none of ours.",
    modes=True,
    devices=True,
)
def around(make):
    layers = nn.Sequential(Block(), Block())
    model = make(layers)
    with compiling() as backend:

        @torch.compile(backend=backend)
        def step(x, y):
            return model.step(x * 2 / 2, y) * 3 / 3

        trained(model, layers, step=step)
        assert sum(model.all([backend.frame_count])) > 0
        package = Path(torchgpipe.__file__).parent
        codes = [code for ref in input_codes.seen if (code := ref()) is not None]
        assert not [x for x in codes if Path(x.co_filename).is_relative_to(package)]


@promise("The wrapper itself may be compiled in place, and runs as it does without.", modes=True)
def wrapper(make):
    layers = nn.Sequential(Block(), Block())
    model = make(layers)
    with compiling() as backend:
        model.model.compile(backend=backend)
        trained(model, layers)
        x = torch.rand(8, 6)
        torch.testing.assert_close(model.forward(x).detach(), layers(x).detach())


@promise("A whole graph that would contain the wrapper is an error that says what to compile.")
def whole_graph(make):
    model = make(nn.Sequential(Block(), Block()))
    with compiling() as backend:
        whole = torch.compile(lambda *x: model.step(*x), backend=backend, fullgraph=True)
        raised = model.raised(whole, *torch.rand(2, 8, 6))
    assert "compiles no more than the layers: compile these" in raised.text, raised.text
