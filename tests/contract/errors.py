"""Errors and what follows them."""

import dataclasses
import os
import re
import signal
import time
from functools import partial

import torch
from torch import nn

from tests.contract.planned import (
    CHUNKS,
    kinds,
    made,
    plan,
    same,
    settings,
    step,
    verify,
    verify_anywhere,
    verify_early,
)
from tests.contract.promises import Otherwise, promise
from tests.contract.wrapped import linears
from tests.support.size import some
from torchgpipe import verify_recomputation
from torchgpipe.ambient.generators import get_state
from torchgpipe.devices.streams import current_streams

APART = Otherwise(
    "After a step that failed, the processes are not connected any more: they start again.",
    "start all processes again",
)

OPERATORS = Otherwise(
    "A graph has operators and knows no layers, so the note names stage and micro-batch alone.",
    r"^no layer: raised in \d[FRBIW]\d on worker \d$",
)


@promise(
    "An error of a layer comes out with its class and its text, from forward, backward and "
    "recomputation, and no other micro-batch begins. From forward and recomputation a note names "
    "the stage, the micro-batch and the layer.",
    otherwise={"ScheduledLoss of graphs": OPERATORS},
    modes=True,
    devices=True,
    fails=True,
)
def layers(make):
    model = made(make)
    for kind in kinds(model):
        if "loss" not in kind and kind != "hook":
            with plan(kind, 1):
                found = model.raised(step, model)
            assert found[:2] == ("PlannedError", "as planned"), kind
            # In backward, each thread of autograd may have begun one more cell by then.
            runs = plan.runs.total()
            time.sleep(0.01)
            assert plan.runs.total() <= runs + (kind != "forward")
            assert not plan.runs["forward", 2] or kind != "forward"
            notes = " ".join(found.notes)
            if kind != "backward":
                assert re.search(model.cell.format(i=1, j=0), notes), notes
                assert re.search(model.layer.format(name=1), notes), f"no layer: {notes}"
            assert len(found.notes) == len({*found.notes}) <= 2


@promise(
    "An error of the loss comes out with its class and its text. Where the loss is inside, a note "
    "says so.",
    otherwise={"ScheduledLoss of graphs": OPERATORS},
    fails=True,
)
def losses(make):
    model = made(make)
    with plan("loss", 0):
        found = model.raised(step, model)
    assert found[:2] == ("PlannedError", "as planned")
    notes = " ".join(found.notes)
    assert ("layer loss" in notes) == model.encloses, f"no layer: {notes}"


@promise(
    "After an error anywhere the next step is right, to the last bit, and all is set as before: "
    "grad mode, autocast, hooks and random numbers.",
    otherwise={"Pipe": APART},
    modes=True,
    devices=True,
    fails=True,
)
def anywhere(make):
    verify_anywhere(made(make), make.mode == "except_last")


@promise(
    "An error in one of the first steps, when nothing is known of the layers, changes no later "
    "step.",
    otherwise={"Pipe": APART},
    modes=True,
    fails=True,
)
def early(make):
    verify_early(partial(made, make, steps=0))


@promise(
    "An error leaves the caller's settings, streams and generators as they were.",
    modes=True,
    devices=True,
    fails=True,
)
def setting(make):
    model = made(make)
    devices = [model.first, model.last]
    for kind in kinds(model):
        before, streams = settings(), current_streams(devices)
        with plan(kind, 1):
            # What a step begins with.
            torch.manual_seed(1)
            torch.rand(2 * CHUNKS, 3), torch.rand(2 * CHUNKS, 4)
            numbers = [get_state(x) for x in devices]
            assert model.raised(step, model)
        verify(before)
        assert current_streams(devices) == streams
        if kind == "forward":
            assert all(map(torch.equal, map(get_state, devices), numbers))


class OddError(Exception):
    """An exception that cannot be made again from its arguments, and is false."""

    def __init__(self, *, reason):
        super().__init__()
        self.reason = reason

    def __bool__(self):
        return False


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception whose attributes cannot be set, notes either."""

    reason: str


ERRORS = (OddError(reason="x"), FrozenError("x"), StopIteration(1), GeneratorExit(), SystemExit(3))
ERRORS += (torch.OutOfMemoryError("x"),)


@promise(
    "Any exception comes out as the same object with one note, also one that ends Python or a "
    "generator, however often it is raised.",
    modes=True,
    devices=True,
    fails=True,
)
def objects(make):
    model = made(make, deferred_batch_norm=True)
    for k, kind in enumerate(kinds(model)):
        for error in some(ERRORS, ERRORS[k % 3 :: 3]) if model.lasts else ERRORS[:1]:
            vars(error).pop("__notes__", None)
            for _ in range(1 + model.lasts):
                caught = []
                with plan(kind, 1, error), verify_recomputation():
                    found = model.raised(_catching, caught, step, model)
                assert found.kind == type(error).__name__
                assert caught == [error] or not model.lasts
            assert len({*found.notes}) == len(found.notes) <= 1 + ("back" in kind), found.notes
            if type(error) is not FrozenError and kind in ("forward", "recomputation"):
                assert re.search(model.cell.format(i=1, j=0), " ".join(found.notes)), found.notes


def _catching(caught, function, *args):
    try:
        function(*args)
    except BaseException as error:
        caught.append(error)
        raise


def press():
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    # Where this is not the caller's thread, that one now has Python.
    time.sleep(0.1)


@promise(
    "Ctrl-C within a step comes out as KeyboardInterrupt, and the next step is right.",
    otherwise={"Pipe": APART},
    modes=True,
    devices=True,
    fails=True,
)
def interruption(make):
    model = made(make)
    before, expected = settings(), step(model)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for kind in kinds(model):
            with plan(kind, 1, press):
                assert model.raised(step, model).kind == "KeyboardInterrupt"
            verify(before)
            same(step(model), expected)
    finally:
        signal.signal(signal.SIGINT, previous)


class Forgetful(nn.Module):
    """A layer that forgets to return its output."""

    def forward(self, x):
        x.tanh()


@promise(
    "A layer that forgets to return its output makes the error that plain layers make, with a note "
    "that names the layer after it.",
    fails=True,
)
def nothing(make):
    layers = nn.Sequential(nn.Linear(3, 3), Forgetful(), nn.Linear(3, 3), nn.Tanh())
    model = make(layers)
    x, y = torch.rand(8, 3), torch.rand(8, 3)
    plain = model.raised(layers, x)
    found = model.raised(model.step, x.to(model.first), y.to(model.last))
    assert found[:2] == plain[:2], found
    notes = " ".join(found.notes)
    assert re.search(model.layer.format(name=2), notes)
    assert re.search(model.cell.format(i=0, j=1), notes)


@promise(
    "An input on another device is an error that says which one it should be on.",
    otherwise={
        "MappedGPipe": Otherwise(
            "The arguments of a mapped module come to its device by themselves.",
            "^None|must have values",
        )
    },
    devices=True,
)
def elsewhere(make):
    model = make(linears(3, 3, 3))
    other = model.last if model.last != model.first else "meta"
    x, y = torch.rand(8, 3, device=other), torch.rand(8, 3, device=model.last)
    found = model.raised(model.step, x, y)
    assert re.search(rf"{model.first}, input: {other}\); pass input.to\(", str(found)), str(found)


@promise("A layer that was moved to another device is an error that names the tensor.", fails=True)
def moved(make):
    model = make(linears(3, 3, 3))
    x, y = torch.rand(8, 3, device=model.first), torch.rand(8, 3, device=model.last)
    model.step(x, y)
    model.layers[2].to("meta")
    found = model.raised(model.step, x, y)
    assert found.kind == "RuntimeError"
    assert re.search(rf"{model.last}, .*weight: meta\); move", found.text)


class Some(nn.Module):
    """A layer whose output has one row, whatever its input has."""

    def forward(self, x):
        return x[:1]


@promise("Outputs of micro-batches that cannot be joined are an error that shows them.", fails=True)
def unjoined(make):
    model = make(nn.Sequential(*linears(3, 3), Some(), nn.Tanh()), loss=lambda y, t: y.mean())
    x, y = torch.rand(7, 3, device=model.first), torch.rand(7, 3, device=model.last)
    found = model.raised(model.step, x, y)
    assert found.kind == "ValueError"
    assert re.search(r"\(.*\).*; ", found.text), found.text


@promise(
    "A bad setting is an error: the rule, the value, and the remedy. The setting stays as it was."
)
def settings_of(make):
    for kind, options in (
        ("ValueError", {"chunks": 0}),
        ("ValueError", {"chunks": "4"}),
        ("ValueError", {"mode": "some"}),
        ("ValueError", {"mode": 3}),
    ):
        ((name, value),) = options.items()
        name = {"mode": "checkpoint"}.get(name, name)
        model = make(linears(3, 3))
        change = partial(setattr, model.pipe, name, value)
        for run in (partial(make, linears(3, 3), **options), change):
            found = model.raised(run)
            assert found.kind == kind, found
            assert re.search(rf"must.*\({name}: {value!r}.*\); ", found.text), found.text
        x, y = torch.rand(8, 3, device=model.first), torch.rand(8, 3, device=model.last)
        assert model.pipe.chunks == 4
        assert model.step(x, y)
