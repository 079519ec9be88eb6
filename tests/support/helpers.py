"""Models, layers and comparisons that several tests use."""

import sys
from itertools import pairwise

import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.engine.pipeline import Pipeline
from torchgpipe.engine.stages import Stages
from torchgpipe.values.microbatch import gather, scatter

#: The checkpoint modes.
MODES = ("never", "except_last", "always")

#: Devices that differ for torchgpipe and are all the CPU for torch: each has a worker of its own.
CPUS = [torch.device("cpu", k) for k in range(4)]


def linears(*sizes):
    """Linear layers from each size to the next."""
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])


def plain(module, input, chunks):
    """Run the module itself on the micro-batches one after another, as the reference."""
    return gather([batch.call(module) for batch in scatter(input, chunks)])


class Plain(nn.Module):
    """The reference as a module, which takes the place of a wrapper."""

    def __init__(self, module, chunks):
        super().__init__()
        self.module, self.chunks = module, chunks

    def forward(self, input):
        return plain(self.module, input, self.chunks)

    def __getitem__(self, index):
        return self.module[index]


def wrap(layers, devices="cpu", mode="always", chunks=3, balance=None, **options):
    """Wrap layers.

    Args:
        layers: a module, a list of layers, or for each partition a list of them.
        devices: one for each partition, or one for all.
        mode: the checkpoint mode.
        chunks: the number of micro-batches.
        balance: by default as even as it can be for several devices, and for one device the first
            layer, the last one, and all between.
        options: for :class:`GPipe`.
    """
    if isinstance(layers[0], list):
        layers, balance = sum(layers, []), [len(partition) for partition in layers]
    n = len(layers)
    if isinstance(devices, str | torch.device):
        balance = balance or ([1] * n if n < 3 else [1, n - 2, 1])
        devices = [devices] * len(balance)
    if balance is None:
        count = min(n, len(devices))
        balance = [n // count] * (count - 1) + [n - n // count * (count - 1)]
    module = layers if isinstance(layers, nn.Module) else nn.Sequential(*layers)
    return GPipe(module, balance, devices=devices, chunks=chunks, checkpoint=mode, **options)


def run_pipeline(partitions, devices, input, *, chunks=1, mode="never", workers=None):
    """Run a pipeline without a wrapper around it."""
    batches = scatter(input, chunks)
    stages = Stages(partitions, devices)
    stages.workers = workers or stages.workers
    Pipeline(stages, batches, [mode] * len(partitions)).run()
    return gather(batches)


def assert_same(output, expected, leaves):
    """Compare outputs bit for bit, and the gradients of the sum of their squares."""
    assert torch.equal(output, expected)
    for a, b in zip(
        torch.autograd.grad(expected.square().sum(), leaves),
        torch.autograd.grad(output.square().sum(), leaves),
    ):
        assert torch.allclose(a, b, atol=1e-6)


def same_buffers(a, b):
    """Check that two modules have the same buffers."""
    for (name, x), y in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(x, y), name


def same_gradients(a, b):
    """Check that the parameters of two modules have the same gradients."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def assert_graphs(training):
    """Check that each stage has been traced, and that no cell had a reason to stay eager."""
    assert training.graphs
    for graphs in training.graphs:
        assert graphs.last is not None
        assert not graphs.reasons


def assert_no_races(seen):
    """Check that no two streams used the same memory without an order."""
    assert not seen.races, "\n".join(map(str, seen.races[:3]))


class Scale(nn.Module):
    """A layer that saves its input, and has a parameter of almost no size."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


class Log(nn.Module):
    """A layer that logs its forward and its backward, and passes its input on."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x):
        return LogFunction.apply(self.name, self.log, x)


class LogFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, log, x):
        ctx.name, ctx.log = name, log
        log.append(("forward", name, x.flatten()[0].item()))
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.log.append(("backward", ctx.name, x.flatten()[0].item()))
        return None, None, grad


def nodes(tensor):
    """All autograd nodes that a tensor's gradient reaches, each with those it leads to."""
    found = {}
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = [edge for edge, _ in node.next_functions if edge is not None]
            waiting += found[node]
    return found


def reaches(graph, start, end):
    """Whether the gradient of one node leads to another."""
    waiting, seen = [start], set()
    while waiting:
        node = waiting.pop()
        if node is end:
            return True
        if node not in seen:
            seen.add(node)
            waiting += graph[node]
    return False


def note_of(error):
    """The note that was added to an exception."""
    if sys.version_info >= (3, 11):
        (note,) = error.__notes__
        return note
    return error.__cause__.args[0]


def notes_of(error):
    """The notes of an exception, which before Python 3.11 are its causes."""
    if hasattr(error, "__notes__"):
        return error.__notes__
    causes = []
    while error.__cause__ is not None:
        error = error.__cause__
        causes.append(str(error))
    return causes
