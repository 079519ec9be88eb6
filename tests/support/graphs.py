"""Graphs of stages, traced without a schedule, and random layers for them."""

import random
import threading
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from torchgpipe._torch.attributes import storage_of
from torchgpipe.graphs.joint import fakes_of
from torchgpipe.graphs.overlap import communicates
from torchgpipe.graphs.parts import Parts
from torchgpipe.graphs.places import Places
from torchgpipe.graphs.slices import CHOICES
from torchgpipe.graphs.stage import costs_of
from torchgpipe.graphs.trace import Marks, trace
from torchgpipe.testing.busy import _spend
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import flatten


def traced(layers, x, *, recorded=True):
    """The joint graph of layers, its form, the places of the layers and their weights."""
    places = Places([layers])
    weights = [p for p in layers.parameters() if p.requires_grad]

    def run(batch, more):
        return Batch(layers(batch.value)), flatten((None, None))

    batch = Batch(x)
    with torch.set_grad_enabled(recorded):
        joint, form = trace(places, places.read(), run, batch, (), weights, Marks())
    return SimpleNamespace(joint=joint, form=form, places=places, weights=weights, batch=batch)


class Stage:
    """A stage as a graph, whose parts are called by hand."""

    def __init__(self, layers, x, recompute="everything", **options):
        self.layers, self.x = layers, x
        found = traced(layers, x, **options)
        self.form, self.places = found.form, found.places
        self.parts = Parts(found.joint, recompute=CHOICES[recompute])
        self.count = len(self.form.needs_grad)

    def call(self, part, **given):
        with torch.no_grad():
            return part.function(part.arguments({"state": self.places.read(), **given}))

    def forward(self):
        """The outputs, and what is saved."""
        found = self.call(self.parts.forward, input=[*Batch(self.x)], more=[])
        return found[: self.count], found[self.count :]

    def checkpointed(self):
        """The outputs, and what is saved, computed in a first run and a second one."""
        given = {"input": [*Batch(self.x)], "more": []}
        found = self.call(self.parts.first, **given)
        return found[: self.count], self.call(self.parts.again, kept=found[self.count :], **given)

    def backward(self, saved, tangents):
        """The gradients of the input, and of the weights."""
        found = self.call(self._for(tangents).backward, saved=saved, tangent=tangents)
        count = len(self.parts.joint.input_grads)
        return found[:count], found[count:]

    def halves(self, saved, tangents):
        """The same, by I and W."""
        given = {"saved": saved, "tangent": tangents}
        parts = self._for(tangents)
        found = self.call(parts.input, **given)
        count = len(self.parts.joint.input_grads)
        return found[:count], self.call(parts.weight, live=found[count:], **given)

    def _for(self, tangents):
        """The backward for these gradients."""
        missing = [k for k, x in enumerate(tangents) if x is None and self.form.needs_grad[k]]
        return self.parts.without(missing) if missing else self.parts


def traced_in(state):
    """The graphs of a stage for one state of its layers."""
    return [x.traced for some in state._entries.values() for x in some if x.traced]


class Kept(NamedTuple):
    """The memory that a cell keeps, in bytes."""

    activation: int
    pending: int
    checkpoint: int


def kept(parts):
    """The memory that a cell keeps of the parts of a stage."""
    costs = costs_of([SimpleNamespace(parts=parts)])
    return Kept(costs.activation[0], costs.pending[0], costs.checkpoint[0])


def peak(parts, part, held=()):
    """The most memory that a part has at a time, in bytes, its arguments and results included.

    Each value is freed after its last use. ``held`` has the nodes whose values stay meanwhile, as
    those that W needs while I runs.
    """
    state = {x for node in parts.joint.state for x in _storages([node])}
    last = {}
    for k, node in enumerate(part.slice.nodes):
        last |= dict.fromkeys(_storages([node, *node.all_input_nodes]), k)
    results = [*held, *[x for x in part.slice.outputs if x is not None]]
    last |= dict.fromkeys(_storages(results), len(part.slice.nodes))
    own = {*part.slice.nodes}
    before = [*part.slice.inputs, *[x for x in held if x not in own]]
    alive = {x: size for x, size in _storages(before).items() if x not in state}
    most = sum(alive.values())
    for k, node in enumerate(part.slice.nodes):
        alive |= {x: size for x, size in _storages([node]).items() if x not in state}
        most = max(most, sum(alive.values()))
        alive = {x: size for x, size in alive.items() if last.get(x, -1) > k}
    return most


def _storages(nodes):
    """The storages of some nodes, with their sizes."""
    return {storage_of(x): x.untyped_storage().nbytes() for node in nodes for x in fakes_of(node)}


class Program(nn.Module):
    """Layers that compute a random program: its values are reused, viewed and changed in place."""

    def __init__(self, seed, length=8, size=4):
        super().__init__()
        rng = random.Random(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(size, size) / 2) for _ in range(3)]
        )
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(2)])
        self.biases[1].requires_grad_(rng.random() < 0.7)
        self.norm = nn.LayerNorm(size)
        self.kernel = nn.Conv1d(1, 1, 3, padding=1)
        self.steps = [
            (rng.choice(STEPS), rng.randrange(100), rng.randrange(100)) for _ in range(length)
        ]

    def forward(self, x):
        values = [x]
        for step, a, b in self.steps:
            first, second = values[a % len(values)], values[b % len(values)]
            values.append(step(self, first, second, b))
        return values[-1] + values[len(values) // 2].sin()


#: What a program may do with two of its values and a number.
STEPS = (
    lambda own, x, y, k: x @ own.weights[k % 3],
    lambda own, x, y, k: torch.addmm(own.biases[k % 2], x, own.weights[k % 3].t()),
    lambda own, x, y, k: x * y,
    lambda own, x, y, k: own.kernel(x.unsqueeze(1)).squeeze(1),
    lambda own, x, y, k: x.tanh() + y,
    lambda own, x, y, k: own.norm(x),
    lambda own, x, y, k: (x * 1).relu_(),
    lambda own, x, y, k: (x + 0.5).mul_(y.detach()),
    lambda own, x, y, k: torch.cat([x[:, 2:], y[:, :2]], 1),
    lambda own, x, y, k: x.t().contiguous().t().clone(),
    lambda own, x, y, k: torch.softmax(x, 1) * own.biases[k % 2],
    lambda own, x, y, k: nn.functional.gelu(x) - y.mean(0, keepdim=True),
)


def is_computing(gate):
    """Whether this thread is in a block of a gate in which it computes."""
    return threading.get_ident() in gate._computing


def _define():
    """Make an operator that stands for a collective: it takes time, and no arithmetic."""

    @torch.library.custom_op("torchgpipe_tests::exchange", mutates_args=())
    def exchange(x: torch.Tensor, cost: float, back: float) -> torch.Tensor:
        _spend(x, cost, "exchange")
        return x.clone()

    @exchange.register_fake
    def _(x, cost, back):
        return torch.empty_like(x)

    def keep(ctx, inputs, output):
        _, ctx.cost, ctx.back = inputs

    def backward(ctx, grad):
        return exchange(grad, ctx.back, ctx.cost), None, None

    exchange.register_autograd(backward, setup_context=keep)


# Mutants import this module once more.
if not hasattr(torch.ops.torchgpipe_tests, "exchange"):
    _define()
communicates(torch.ops.torchgpipe_tests.exchange)


class Exchange(nn.Module):
    """A layer that communicates in forward, and in backward."""

    def __init__(self, cost=0.0, back=0.0):
        super().__init__()
        self.costs = cost, back

    def forward(self, x):
        return torch.ops.torchgpipe_tests.exchange(x, *self.costs)
