"""Exceptions of layers come out as they are, and leave nothing behind; on accelerators, too."""

import dataclasses
import gc
import sys
import time
import traceback
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, note_of
from torchgpipe import GPipe, is_recomputing, verify_recomputation
from torchgpipe.ambient.context import Modes

WIDTH = 4


class SpecialError(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, *, reason):
        super().__init__()
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception whose attributes cannot be set."""

    reason: str


class FalsyError(Exception):
    def __bool__(self):
        return False


ERRORS = [
    partial(ValueError, "x"),
    partial(SpecialError, reason="x"),
    partial(FrozenError, "x"),
    FalsyError,
    partial(StopIteration, 1),
    GeneratorExit,
    partial(SystemExit, 3),
    KeyboardInterrupt,
    partial(torch.OutOfMemoryError, "x"),
]


@pytest.fixture
def places(device):
    """Devices of three partitions."""
    return [device] * 3


class Tricky(nn.Module):
    """A layer that raises in its k-th run of a kind, if `ready` asked for that."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fail = {}
        self.runs = {"forward": 0, "recomputation": 0, "backward": 0}

    def ready(self, **fail):
        self.fail, self.runs = fail, dict.fromkeys(self.runs, 0)

    def count(self, kind):
        k, self.runs[kind] = self.runs[kind], self.runs[kind] + 1
        if kind in self.fail and self.fail[kind][0] == k:
            raise self.fail[kind][1]()

    def forward(self, x):
        self.count("recomputation" if is_recomputing() else "forward")
        return Counted.apply(self.linear(x).tanh(), self)


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.count("backward")
        return grad, None


def made(places, mode="always", chunks=3, **options):
    torch.manual_seed(1)
    module = nn.Sequential(*[Tricky() for _ in range(3)])
    return GPipe(module, [1, 1, 1], devices=places, chunks=chunks, checkpoint=mode, **options)


def data(model, rows=6):
    return torch.rand(rows, WIDTH, device=model.devices[0])


def step(model, x, **fail):
    """Train on a mini-batch in which layer 1 fails as asked; return the gradients."""
    model[1].ready(**fail)
    model(x).sum().backward()
    grads = [parameter.grad.cpu() for parameter in model.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: getattr(make, "func", make).__name__)
@pytest.mark.parametrize("kind", ["forward", "recomputation", "backward"])
def test_exception_is_the_same_object(places, kind, make):
    error = make()
    model = made(places)
    x = data(model)
    expected = step(model, x)
    before = Modes.current()
    with pytest.raises(type(error)) as caught:
        step(model, x, **{kind: (1, lambda: error)})
    assert caught.value is error
    assert "count" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert Modes.current() == before
    if kind != "backward" and type(error) is not FrozenError:
        assert note_of(error) == "raised in partition 1, micro-batch 1, layer 1 (Tricky)"
    model.zero_grad()
    assert all(map(torch.equal, step(model, x), expected))


def test_exception_passes_what_a_step_is_within(places):
    """A step sets no attributes of an exception on its way; this one would refuse."""
    model = made(places, deferred_batch_norm=True)
    error = FrozenError("x")
    with pytest.raises(FrozenError) as caught, verify_recomputation():
        step(model, data(model), forward=(0, lambda: error))
    assert caught.value is error


@pytest.mark.parametrize(
    ("mode", "kind", "k"),
    [
        (mode, kind, k)
        for mode in MODES
        for kind in ("forward", "recomputation", "backward")
        for k in range(3)
        if kind != "recomputation" or k < {"never": 0, "except_last": 2, "always": 3}[mode]
    ],
)
def test_all_tensors_are_released_once_the_exception_is_dropped(places, mode, kind, k):
    model = made(places, mode)
    x = data(model)
    step(model, x)
    refs = []
    for layer in model:
        layer.register_forward_hook(lambda _, inputs, output: refs.append(weakref.ref(output)))
        layer.register_forward_pre_hook(lambda _, inputs: refs.append(weakref.ref(inputs[0])))
    gc.disable()
    try:
        with suppress(ValueError):
            step(model, x, **{kind: (k, partial(ValueError, "x"))})
        # Threads of accelerators drop their tensors after a moment.
        for _ in range(100):
            if all(ref() is None for ref in refs):
                break
            time.sleep(0.01)
        assert len(refs) > 3
        assert [ref() for ref in refs if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["forward", "recomputation", "backward"])
def test_no_cell_starts_after_it(places, kind):
    model = made(places)
    x = data(model, 30)
    model.chunks = 30
    step(model, x)
    for layer in model:
        layer.ready()
    with pytest.raises(ValueError, match="x"):
        step(model, x, **{kind: (1, partial(ValueError, "x"))})
    first = [sum(layer.runs.values()) for layer in model]
    time.sleep(0.05)
    # In backward, each of autograd's threads may have begun one more cell by then.
    begun = kind != "forward"
    assert all(sum(layer.runs.values()) <= k + begun for k, layer in zip(first, model))


def test_second_step_after_a_failure_in_every_cell(places):
    model = made(places, "except_last", chunks=2)
    x = data(model)
    expected = step(model, x)
    for kind in ("forward", "recomputation", "backward"):
        for k in range(2):
            for layer in model:
                fail = {kind: (k, partial(ValueError, "x"))}
                for other in model:
                    other.ready(**(fail if other is layer else {}))
                with suppress(ValueError):
                    model(x).sum().backward()
                layer.ready()
                model.zero_grad()
                assert all(map(torch.equal, step(model, x), expected))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it is a cause there")
def test_note_is_added_once(places):
    """Layers raise one object again and again, which still bears one note."""
    error = ValueError("x")
    model = made(places)
    for _ in range(3):
        with suppress(ValueError):
            step(model, data(model), forward=(0, lambda: error))
    assert error.__notes__ == ["raised in partition 1, micro-batch 0, layer 1 (Tricky)"]
