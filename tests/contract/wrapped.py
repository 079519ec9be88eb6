"""One way to make and to use each wrapper, for promises that do not know which one it is."""

import copy
import warnings
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import MODES, notes_of
from tests.support.size import SOAK
from torchgpipe import Chunks, GPipe, MappedGPipe, Offload, ScheduledLoss
from torchgpipe.values.structure import Arguments

aten = torch.ops.aten

#: The runs: for each its wrapper, and for schedules the name and the kind of stages.
RUNS = {
    "GPipe": ("GPipe",),
    "ScheduledLoss 1f1b": ("ScheduledLoss", "1f1b", "eager"),
    "ScheduledLoss zbh1": ("ScheduledLoss", "zbh1", "eager"),
    "ScheduledLoss 1f1b, graphs": ("ScheduledLoss of graphs", "1f1b", "graph"),
    "ScheduledLoss zbh1, graphs": ("ScheduledLoss of graphs", "zbh1", "graph"),
    "MappedGPipe": ("MappedGPipe",),
    "Pipe": ("Pipe", "zbh1"),
}


def dear(context, operator, *args, **kwargs):
    """A policy that keeps products of matrices and sums, and no other result."""
    kept = operator in (aten.mm.default, aten.addmm.default, aten.add.Tensor)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


#: The checkpoint modes, by the words that stand for them in the names of tests; for which of them
#: cells run twice says :func:`twin_of`.
KEEPINGS = {
    **{mode: mode for mode in (*MODES, "offload")},
    "share": Offload(share=0.5),
    "policy": partial(create_selective_checkpoint_contexts, dear),
}


def modes_of(run):
    """The modes that a run has."""
    return MODES if RUNS[run][0].endswith("of graphs") else (*KEEPINGS,)


def twin_of(mode):
    """The word among the first ones under which as many cells run twice."""
    return {"offload": "never", "share": "never", "policy": "always"}.get(mode, mode)


class Raised(NamedTuple):
    """An error that a wrapper has raised: its class by name, its text, and its notes."""

    kind: str
    text: str
    notes: list


class Maker:
    """Wrap layers, always in the same way.

    Args:
        run: the name of the run.
        mode: the word for the checkpoint mode.
        devices: two.
    """

    def __init__(self, run, mode="except_last", devices=("cpu", "cpu")):
        self.run, self.mode, self.again = run, mode, twin_of(mode)
        self.wrapper, *self.kind = RUNS[run]
        self.devices = [torch.device(device) for device in devices]

    def __call__(self, layers, *, chunks=4, loss=F.mse_loss, mode=None, weight_of=None, **options):
        """Wrap layers, half of which come to each of the two devices.

        Args:
            layers: at least two. They are copied, so that the caller keeps the plain ones.
            chunks: the number of micro-batches.
            loss: called with the output and the targets, and returns a mean over rows.
            mode: the checkpoint mode, if it has to be a certain one.
            weight_of: for wrappers whose loss is inside, the weight of its sum.
            options: for the wrapper's class, where all wrappers have them.
        """
        layers, self.weight_of = copy.deepcopy(layers), weight_of
        mode = mode or self.mode
        options |= {"chunks": chunks, "checkpoint": KEEPINGS.get(mode, mode)}
        return self.wrap(layers, loss, options)

    def some(self, cases):
        """The cases of this run: all in a soak, or else every other one, by turns of the runs.

        Where stages are traced, which takes long, they are every fourth one.
        """
        if SOAK:
            return [*cases]
        if self.wrapper == "ScheduledLoss of graphs":
            return [*cases]["zbh1" in self.kind :: 4]
        return [*cases][[*RUNS].index(self.run) % 2 :: 2]

    def wrap(self, layers, loss, options):
        """Wrap layers that nobody else has."""
        if self.wrapper == "MappedGPipe":
            names = [*layers._modules]
            half = len(names) // 2
            where = {name: self.devices[k >= half] for k, name in enumerate(names)}
            return Mapped(self, layers, MappedGPipe(layers, where, **options), loss)
        half = len(layers) // 2
        balance = [half, len(layers) - half]
        model = GPipe(layers, balance, devices=self.devices, **options)
        if self.wrapper == "GPipe":
            return Wrapped(self, layers, model, loss)
        schedule, stages = self.kind
        training = ScheduledLoss(
            model, loss, schedule, stages=stages, outputs=True, weight_of=self.weight_of
        )
        return Scheduled(self, layers, training, loss)


class Wrapped:
    """Layers in a wrapper.

    Attributes:
        layers: the layers themselves; their parameters have the gradients.
        model: the wrapper.
        cell: how a note names micro-batch ``i`` of stage ``j``.
        layer: how a note names a layer.
        lasts: whether steps may follow one that failed.
        encloses: whether the loss is inside.
        output: the output of the latest step.
    """

    cell, layer = "partition {j}, micro-batch {i}", r"layer {name} \("
    lasts, encloses = True, False
    output = None

    def __init__(self, maker, layers, model, loss):
        self.maker, self.layers, self.model, self.criterion = maker, layers, model, loss

    @property
    def first(self):
        """The device that inputs are on."""
        return self.maker.devices[0]

    @property
    def last(self):
        """The device that outputs are on."""
        return self.maker.devices[-1]

    @property
    def pipe(self):
        """The module that has the state dict."""
        return self.model

    def twin(self, duplicate):
        """The same around a copy of the wrapper."""
        copy = type(self)(self.maker, None, duplicate(self.model), self.criterion)
        copy.layers = copy.pipe.module
        return copy

    def forward(self, *args, **kwargs):
        """The output. It has a graph where the wrapper's outputs have one."""
        return self.model(*args, **kwargs)

    def loss(self, input, *targets):
        """The loss of a mini-batch, before its backward."""
        self.output = self.forward(input)
        if not any(isinstance(x, Chunks) for x in targets):
            return self._loss_of(self.output, targets)
        # The caller has divided the mini-batch.
        each = zip(self.output, *[x.value for x in targets])
        return sum(self._loss_of(output, rest) for output, *rest in each) / len(self.output)

    def _loss_of(self, output, targets):
        found = self.criterion(output, *[getattr(x, "value", x) for x in targets])
        # A sum and its weight, which schedules divide at the end.
        return found[0] / found[1] if isinstance(found, tuple) else found

    def step(self, input, *targets):
        """Compute a mini-batch, and the gradients of its loss; return the loss."""
        loss = self.loss(input, *targets)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def clip_grad_norm(self, norm):
        """Clip the gradients, and return their norm before."""
        return nn.utils.clip_grad_norm_(self.layers.parameters(), norm)

    def loss_with(self, tensors, input, *targets):
        """The loss with other parameters and buffers, by their names in the layers."""
        own = {id(x): name for name, x in _tensors(self.layers)}
        each = [(name, own[id(x)], x.device) for name, x in _tensors(self.model)]
        given = {name: tensors[key].to(device) for name, key, device in each if key in tensors}
        return self.called_with(given, input, *targets)

    def called_with(self, given, input, *targets):
        """The same, by their names in the wrapper."""
        return self.criterion(functional_call(self.model, given, (input,)), *targets)

    def train(self, mode=True):
        """Set the mode of all layers."""
        self.model.train(mode)
        return self

    def zero_grad(self):
        """Take the gradients away."""
        self.layers.zero_grad()

    @property
    def grads(self):
        """The gradients, by name."""
        return grads_of(self.layers)

    @property
    def parameters(self):
        """The parameters, by name."""
        return dict(self.layers.named_parameters())

    def input_grads(self, tensors):
        """The gradients of tensors of the input."""
        return [x.grad for x in tensors]

    @property
    def buffers(self):
        """The buffers, by name."""
        return dict(self.layers.named_buffers())

    @property
    def state(self):
        """The state dict, with the keys of the plain layers."""
        return self.pipe.module.state_dict()

    def all(self, found):
        """Entries of a list, or of a dict, that Python code of layers made, in all processes."""
        return found

    def raised(self, function, *args):
        """The error that a function raises; None if it raises none."""
        try:
            function(*args)
        except BaseException as error:
            notes = notes_of(error)
            return Raised(type(error).__name__, str(error), notes)
        return None

    @contextmanager
    def warned(self):
        """Collect the texts of warnings in a list, within the block."""
        found = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found += self.all([str(x.message) for x in caught])


def _tensors(module):
    return [*module.named_parameters(), *module.named_buffers()]


class Mapped(Wrapped):
    """Layers of a device map."""

    cell, layer = "micro-batch {i}", "raised in {name} on"

    def forward(self, *args, **kwargs):
        if isinstance(args[0], Arguments):
            args, kwargs = args[0]
        return self.model(*args, **kwargs)


class Scheduled(Wrapped):
    """Layers under a schedule, whose losses have a graph that leads to the parameters alone."""

    cell, encloses = "raised in {j}[FRBIW]{i} on", True

    @property
    def pipe(self):
        """The model that is wrapped twice."""
        return self.model.model

    def forward(self, *args, **kwargs):
        return self.pipe(*args, **kwargs)

    def loss(self, input, *targets):
        loss, self.output = self.model(input, *targets)
        return loss

    def called_with(self, given, input, *targets):
        return functional_call(self.model, given, (input, *targets))[0]


def linears(*sizes):
    """Linear layers with smooth functions between them."""
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers)


def plain_step(layers, input, *targets, loss=F.mse_loss, chunks=1):
    """A step of the plain layers, micro-batch by micro-batch; returns the loss.

    Each loss counts by its share of the rows, as in a loop that accumulates gradients.
    """
    rows = len(input)
    total = 0
    for k in range(min(chunks, rows)):
        part = slice(rows * k // chunks, rows * (k + 1) // chunks)
        share = len(input[part]) / rows
        value = loss(layers(input[part]), *[x[part] for x in targets]) * share
        value.backward()
        total = total + value.detach()
    return total


def grads_of(layers):
    """The gradients by all names of their parameters, which layers may share."""
    return {name: x.grad for name, x in layers.named_parameters(remove_duplicate=False)}


def assert_same_grads(model, layers, **tolerance):
    """Check that a wrapped model has the gradients of the plain layers, and that there are any."""
    expected = grads_of(layers)
    found = model.grads
    assert {name for name, x in found.items() if x is not None} == {
        name for name, x in expected.items() if x is not None
    }
    assert any(x is not None for x in expected.values())
    for name, grad in expected.items():
        if grad is not None:
            torch.testing.assert_close(found[name].to(grad.device), grad, **tolerance)


def trained(model, layers, rows=(8, 8), step=None):
    """Check losses and gradients of steps against the plain layers, which have six features."""
    for count in rows:
        x, y = torch.rand(2, count, 6)
        expected = plain_step(layers, x, y)
        found = (step or model.step)(x.to(model.first), y.to(model.last))
        torch.testing.assert_close(found.cpu(), expected)
        assert_same_grads(model, layers)
