"""Compiled layers compute what plain layers do, and PyTorch does not compile the wrapper."""

from collections import OrderedDict
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.helpers import Plain
from tests.support.size import some
from torchgpipe import GPipe, is_recomputing
from torchgpipe._torch.dynamo import VERSION
from torchgpipe.recompute.runs import phase
from torchgpipe.skip import Namespace, pop, skippable, stash

# The compiler reads the gradient of every input, also of one that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


#: The backend where only the number of graphs matters.
COUNTING = some("aot_eager", "eager")

#: The sizes of mini-batches that come one after another.
ROWS = some((12, 11, 7, 3, 13), (12, 11, 7, 3))


@pytest.fixture(autouse=True)
def anew():
    """Forget all compiled graphs before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend():
    """A backend that counts the graphs it compiles."""
    return CompileCounterWithBackend("aot_eager")


class Block(nn.Module):
    """A block that saves more for backward than its input and its weights."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.norm(nn.functional.gelu(self.linear(x))) + x


class Scriptable(nn.Module):
    """A scriptable layer that saves more for backward than its input and its weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).tanh().sigmoid() * x


def blocks(kind=Block, count=4):
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def wrapped(layers, way, backend, *, whole=True, **options):
    """Wrap layers compiled in one of the ways in two partitions, which compile as whole graphs."""
    half = len(layers) // 2
    if way == "layers":
        layers = [torch.compile(x, backend=backend) for x in layers]
    elif way == "in place":
        for x in layers:
            x.compile(backend=backend)
    elif way == "sequence":
        parts = [nn.Sequential(*layers[:half]), nn.Sequential(*layers[half:])]
        layers = [torch.compile(x, backend=backend, fullgraph=whole) for x in parts]
    balance = [len(layers) // 2, len(layers) - len(layers) // 2]
    model = GPipe(nn.Sequential(*layers), balance, devices=["cpu", "cpu"], **options)
    if way == "partitions":
        for partition in model.partitions:
            partition.compile(backend=backend, fullgraph=whole)
    return model.double()


def step(model, input):
    """The output and the gradients of a step."""
    model.zero_grad()
    output = model(input)
    output.square().sum().backward()
    return [output.detach(), *[p.grad for p in model.parameters()]]


def micro_batches(layers):
    """The plain layers, which run on the micro-batches one after another."""
    return Plain(nn.Sequential(*layers).double(), 4)


def input_of(rows):
    return torch.rand(rows, 6, dtype=torch.double)


@cache
def counts_of_plain_layers():
    """Number of graphs after the micro-batches of each mini-batch."""
    counter = CompileCounterWithBackend(COUNTING)
    reference = micro_batches([torch.compile(x, backend=counter) for x in blocks(count=2)])
    counts = []
    for rows in ROWS:
        step(reference, input_of(rows))
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize(
    ("way", "mode"), [("layers", "always"), ("partitions", "except_last")][: some(2, 1)]
)
def test_changing_sizes(way, mode):
    """PyTorch makes as many graphs as for plain layers on the micro-batches, and then no more."""
    backend = CompileCounterWithBackend(COUNTING)
    expected = counts_of_plain_layers()
    model = wrapped(blocks(count=2), way, backend, chunks=4, checkpoint=mode)
    plain = micro_batches(blocks(count=2))
    counts = []
    for rows in ROWS:
        input = input_of(rows)
        torch.testing.assert_close(step(model, input), step(plain, input))
        counts.append(backend.frame_count)
    if way == "layers":
        assert counts == expected
    assert counts[-1] <= expected[-1]
    for rows in some(range(4, 20, 3), (4, 19)):
        step(model, input_of(rows))
    assert backend.frame_count == counts[-1]


def test_compiled_anew_between_forward_and_backward():
    """The graph for any size also fits the first input, and saves one more tensor."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        if len(compiled) == 1:
            return graph.forward
        return lambda *inputs: [x.sigmoid().logit() for x in graph(*inputs)]

    layer = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), backend=backend)
    model = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="always")
    outputs = [model(torch.rand(rows, 6)) for rows in (8, 10, 8)]
    for output in outputs:
        output.sum().backward()
    assert len(compiled) == 2


@pytest.mark.parametrize(("mode", "around"), [("always", False), ("except_last", True)])
def test_autocast(mode, around, backend):
    """Both runs share one graph, and gradients are right if backward has a block of its own."""
    model, plain = [
        wrapped(blocks(), way, backend, chunks=4, checkpoint=mode).float()
        for way in ("layers", "plain")
    ]
    found = []
    for x in (plain, model):
        with torch.autocast("cpu"):
            loss = x(torch.ones(8, 6)).float().square().sum()
        with torch.autocast("cpu") if around else nullcontext():
            loss.backward()
        found.append([p.grad for p in x.parameters()])
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    if not around:
        assert backend.frame_count == 2


class Counter(nn.Module):
    """A layer that counts once per micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if not is_recomputing():
            self.count += 1
        return self.linear(x).tanh()


@pytest.mark.parametrize("way", some(["layers", "sequence"], ["layers"]))
def test_is_recomputing(way):
    """Compiled layers ask it in every run, even if something else compiled them before."""
    # As in a thread that has not computed under checkpointing yet.
    phase.__dict__.pop("recomputing", None)
    options = {"chunks": 4, "checkpoint": "always", "whole": False}
    model = wrapped(blocks(Counter, 2), way, "eager", **options)
    model[0](input_of(3))
    for _ in range(3):
        step(model, input_of(8))
    counts = [buffer.item() for buffer in model.buffers()]
    assert counts == [13, 12]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        yield stash("skip", x * 2)
        return self.linear(x).tanh()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        skip = yield pop("skip")
        return self.linear(x).tanh() * skip


@pytest.mark.parametrize("way", some(["layers", "in place", "partitions"], ["partitions"]))
def test_skips(way, backend):
    def layers():
        torch.manual_seed(0)
        outer, inner = Namespace(), Namespace()
        return [
            Stash().isolate(outer),
            Stash().isolate(inner),
            Pop().isolate(inner),
            Pop().isolate(outer),
        ]

    model = wrapped(layers(), way, backend, chunks=4, checkpoint="always", whole=False)
    plain = GPipe(nn.Sequential(*layers()), [2, 2], devices=["cpu"] * 2, chunks=4).double()
    for _ in range(2):
        input = input_of(8)
        torch.testing.assert_close(step(model, input), step(plain, input))
    # Each namespace, and what requires no gradient, has a graph of its own. A newer compiler puts
    # all layers of a partition into one. Before PyTorch 2.13 what a layer does itself runs as
    # Python.
    counts = {4, 2} if way == "partitions" else {4}
    assert backend.frame_count in (counts if VERSION >= (2, 13) else {0})


@pytest.mark.parametrize("deferred", [False, True])
def test_batch_normalisation(deferred, backend):
    """Norms update statistics once, and PyTorch does not compile a deferred norm in every step."""

    def layers():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]

    options = {"chunks": 4, "checkpoint": "always", "deferred_batch_norm": deferred}
    model = wrapped(layers(), "layers", backend, **options)
    plain = wrapped(layers(), "plain", backend, **options)
    for _ in range(4):
        input = input_of(12)
        torch.testing.assert_close(step(model, input), step(plain, input))
    torch.testing.assert_close([*model.buffers()], [*plain.buffers()])
    assert backend.frame_count <= 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted():
    layers = [torch.jit.script(x) for x in blocks(Scriptable)]
    model = GPipe(nn.Sequential(*layers), [2, 2], devices=["cpu"] * 2, chunks=4)
    model.double()
    with pytest.raises(TypeError, match="must not be scripted.*use checkpoint='never'"):
        model(input_of(8))
    model.checkpoint = "never"
    plain = micro_batches(blocks(Scriptable))
    for _ in range(4):
        input = input_of(8)
        torch.testing.assert_close(step(model, input), step(plain, input))


def test_parameters_in_a_dict_of_another_kind():
    """A whole model that an older PyTorch pickled may have such a dict."""
    layers = blocks()
    for layer in layers:
        layer._parameters = OrderedDict(layer._parameters)
        layer.linear._parameters = OrderedDict(layer.linear._parameters)
    model = GPipe(nn.Sequential(*layers), [2, 2], devices=["cpu"] * 2, chunks=4).double()
    input = input_of(8)
    torch.testing.assert_close(step(model, input), step(micro_batches(blocks()), input))
