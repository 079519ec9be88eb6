"""Memory: what lives after a step, and after a model."""

import gc
import time
import weakref
from contextlib import contextmanager

import torch
from torch import nn

from tests.contract.planned import kinds, made, plan, step
from tests.contract.promises import GRAPHS, POLICY, Otherwise, promise
from tests.support.helpers import MODES
from tests.support.live_storages import LiveStorages
from tests.support.long_runs import eventually, verify_nothing_stays
from torchgpipe.skip import pop, skippable, stash


@contextmanager
def uncollected():
    """Turn Python's collector off. What is given counts what it would find of what is new."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()


class Values(nn.Module):
    """A layer that takes a tensor, or a value of several containers, and returns another one."""

    def __init__(self, last=False):
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), last

    def forward(self, value):
        x, *_ = value["x"] if isinstance(value, dict) else [value]
        x = self.norm(self.linear(x)).tanh()
        return x if self.last else {"x": [x, x * 2]}


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that stashes a tensor of such a value."""

    def forward(self, value):
        yield stash("skip", {"x": [value["x"][0] * 2, None]})
        return value


@skippable(pop=["skip"])
class Pop(nn.Module):
    """A layer that adds it."""

    def forward(self, value):
        skip = yield pop("skip")
        return {"x": [x + skip["x"][0] for x in value["x"]]}


def valued(make, **options):
    """A model with values of several containers, and skips where the wrapper has them."""
    first, last = Values(), Values(True)
    if make.wrapper != "MappedGPipe":
        first, last = nn.Sequential(first, Stash()), nn.Sequential(Pop(), last)
    return make(nn.Sequential(first, Values(), Values(), last), **options)


def train(model, rows=8):
    """Take a step; return weak references to what was given."""
    x, y = torch.rand(rows, 4, device=model.first), torch.rand(rows, 4, device=model.last)
    model.step(x, y)
    return [weakref.ref(x), weakref.ref(y)]


def evaluate(model):
    """Compute a loss without gradients."""
    with torch.no_grad():
        return train(model)


def drop(model):
    """Let go of gradients and outputs."""
    model.zero_grad()
    model.output = None


def emptied(model):
    """The number of new tensors that live when gradients and outputs do not."""
    drop(model)
    # isinstance() would ask some objects for their class.
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def verify_emptied(model, before):
    """Check that no more tensors live than before; threads drop theirs after a moment."""
    found = emptied(model)
    for _ in range(100):
        if found <= before:
            return
        time.sleep(0.01)
        found = emptied(model)
    raise AssertionError(f"{found} tensors instead of {before}")


def verify_collected(make, count):
    """Check that nothing was left to the collector, but for functions of PyTorch's policies."""
    assert count == 0 or make.mode == POLICY


@promise(
    "A step leaves no tensor but gradients: not the mini-batch, nor outputs, nor gradients between "
    "layers.",
    modes=True,
    devices=True,
)
def after(make):
    model = valued(make)
    for _ in range(3):
        train(model)
    with uncollected():
        train(model)
        before = emptied(model)
        given = train(model)
        verify_emptied(model, before)
        assert [x() for x in given if x() is not None] == []
    if make.wrapper == GRAPHS:
        # They are eager within the mode that counts.
        return
    # What autograd saves is no object of Python.
    with LiveStorages() as live:
        train(model)
        drop(model)
    # Threads that send and receive drop theirs after a moment.
    eventually(lambda: not live.sizes())
    assert live.sizes() == []


@promise("Without gradients a step keeps nothing while it computes.", eager=True)
def evaluation(make):
    model = make(nn.Sequential(*[nn.Linear(32, 32) for _ in range(16)]), chunks=2, mode="never")
    x, y = torch.rand(8, 32), torch.rand(8, 32)
    highest = {}
    for training, recorded in ((True, True), (True, False), (False, False)):
        model.train(training)
        with torch.set_grad_enabled(recorded):
            for _ in range(2):
                model.step(x, y)
            with LiveStorages() as live:
                model.step(x, y)
        highest[training, recorded] = live.highest / (4 * 4 * 32)
        drop(model)
    assert highest.pop((True, True)) > 16, highest
    assert max(highest.values()) < 8, highest


@promise(
    "A step leaves nothing to Python's collector, with and without gradients.",
    modes=True,
    devices=True,
)
def garbage(make):
    for use in (train, evaluate):
        model = valued(make)
        for _ in range(3):
            use(model)
        with uncollected() as collect:
            use(model)
            verify_collected(make, collect())


@promise("A model is free at once when nobody holds it, after steps of any kind.", devices=True)
def deleted(make):
    for uses in ((evaluate,), (train, evaluate, train)):
        model = valued(make)
        for use in uses:
            use(model)
        with uncollected():
            parts = (model.model, *model.model.modules(), *model.model.parameters())
            found = [weakref.ref(x) for x in parts]
            del model, parts
            assert [x() for x in found if x() is not None] == []


@promise(
    "An error leaves nothing either once it is dropped, and nothing to the collector.",
    modes=True,
    devices=True,
    fails=True,
)
def errors(make):
    model = made(make)
    for kind in kinds(model):
        with uncollected() as collect:
            step(model)
            before = emptied(model)
            collect()
            with plan(kind, 1):
                assert model.raised(step, model)
            verify_emptied(model, before)
            verify_collected(make, collect())


@promise(
    "A loss without its backward is let go of with all that it depends on.",
    otherwise={"Pipe": Otherwise("A step has its backward inside.", "does not require grad")},
    modes=True,
)
def unused(make):
    model = valued(make)
    x, y = torch.rand(8, 4), torch.rand(8, 4)
    for _ in range(2):
        model.loss(x, y).backward()
    with uncollected() as collect:
        model.loss(x, y).backward()
        before = emptied(model)
        loss = model.loss(x, y)
        assert loss.requires_grad
        del loss
        verify_emptied(model, before)
        verify_collected(make, collect())


@promise(
    "However many steps there are, in other modes and of other sizes, nothing adds up: no tensors, "
    "threads, files or memory. Nor do steps that fail add to it.",
    devices=True,
)
def loop(make):
    model = valued(make, chunks=3)
    failing = made(make) if model.lasts else None
    used = {x for x in (model.first, model.last) if x.type != "cpu"}

    def run(k):
        model.pipe.checkpoint = MODES[k % 3]
        with torch.set_grad_enabled(k % 4 > 0):
            train(model, (6, 8, 9)[k % 3])
        drop(model)
        if failing:
            found = kinds(failing)
            with plan(found[k % len(found)], 0):
                assert failing.raised(step, failing)
            drop(failing)

    verify_nothing_stays(run, allocated=lambda: sum(map(torch.accelerator.memory_allocated, used)))
