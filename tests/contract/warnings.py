"""Warnings: each once per wrapper, with what to do, and none without need."""

import re
import warnings
from array import array
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contract.comparing import layers_of, mean_of_squares
from tests.contract.promises import Otherwise, promise
from tests.support.structures import Partial, rows
from torchgpipe import NoChunk, arguments


def warned(run):
    """The texts of warnings that each process gives while it makes a model and runs steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = run()
    texts = [str(x.message) for x in caught]
    # Once per wrapper, and with a line of the caller.
    assert len(texts) == len({*texts}), texts
    assert all(Path(x.filename).parent == Path(__file__).parent for x in caught), texts
    return sorted({*model.all(texts)})


def steps(make, layers, input, loss=mean_of_squares, **options):
    """A function that wraps layers and runs two steps."""

    def run():
        model = make(layers, loss=loss, **options)
        for _ in range(2):
            model.step(input)
        return model

    return run


def checked_warning(run, *patterns):
    """Check that something gives one warning, which may be silenced by its own words."""
    (found,) = warned(run)
    for pattern in patterns:
        assert re.search(pattern, found), found
    (words,) = re.findall(r"filterwarnings\('ignore', '(.*)'\)", found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", words)
        run()


@promise("Layers that take dimension 0 for the sequence are a warning that names them.")
def sequence_first(make):
    layers = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 4))
    run = steps(make, layers, torch.rand(8, 3, 4))
    checked_warning(run, r"1 \(TransformerEncoderLayer\)", "chunks: 4", "batch_first=True")


def first(x, *others, **named):
    return x


def calls(entries):
    """Inputs of two steps with an entry for each row somewhere, and how it is called there."""
    x = rows(4)
    return {
        "": (x, entries),
        "args": arguments(x, entries),
        "kwargs": arguments(x, y=entries),
        "deep": arguments(x, {"a": [entries, x]}),
    }


@promise(
    "A list or an array with an entry for each row, which is not split, is a warning that says "
    "where it is; so is a list with a tensor for each row, which is split, where its tensors have "
    "as many rows.",
)
def entries_for_each_row(make):
    kinds = [["a", "b", "c", "d"], [[1], [2], [3, 4], []], array("d", [1, 2, 3, 4]), range(4)]
    kinds += [pytest.importorskip("numpy").zeros((4, 2)), [rows(4) for _ in range(4)]]
    kinds += [[{"x": rows(4)} for _ in range(4)]]
    mean = "entries: 4, micro-batches: 2", "torchgpipe.NoChunk"
    places = {"": r"\[1\]", "args": r"args\[1\]", "kwargs": r"kwargs\['y'\]", "deep": r"\[0\]"}
    for k, entries in enumerate(make.some(kinds)):
        name = [*places][k % 4]
        value = calls(entries)[name]
        layers = layers_of(Partial(lambda v: v[0]) if not name else first, nn.Linear(3, 3))

        run = steps(make, layers, value, chunks=2)
        either = isinstance(entries, list) and isinstance(entries[0], torch.Tensor | dict)
        checked_warning(run, places[name], *(["entries: 4", "a tuple"] if either else mean))


@promise("Training with fewer micro-batches than devices is a warning.", devices=True)
def idle_devices(make):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    run = steps(make, layers, torch.rand(4, 3, device=make.devices[0]), chunks=1)
    if make.wrapper == "MappedGPipe" and len({*make.devices}) == 1:
        # A map to one device has nothing to overlap.
        assert warned(run) == []
        return
    checked_warning(run, "idle for 50%", "rows: 4, devices: 2", "set model.chunks")


@promise(
    "An output that compares the rows of a micro-batch with each other, as contrastive models do, "
    "is a warning that says how to compare all rows.",
)
def compared_rows(make):
    layers = layers_of(nn.Linear(8, 8), lambda x: x @ x.T)

    run = steps(make, layers, torch.rand(6, 8), chunks=2)
    checked_warning(run, r"output: \(3, 3\), rows of the mini-batch: 6", "after the wrapper")


@promise(
    "Under autocast to float16, a step whose backward is inside of the call, and has no gradient "
    "scaler, is a warning.",
    otherwise=dict.fromkeys(
        ("GPipe", "MappedGPipe"),
        Otherwise("backward is the caller's, and so is the scaler", "^no warning"),
    ),
)
def float16(make):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def run():
        model = make(layers, loss=mean_of_squares)
        with torch.autocast("cpu", torch.float16):
            model.step(rows(8, requires_grad=False))
        return model

    found = warned(run)
    assert found, "no warning"
    assert all("bfloat16" in text and "autocast" in text for text in found)


class Centre(nn.Module):
    """A layer that updates its centre in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.1)
        return x - self.centre.clone()


@promise(
    "A persistent buffer that layers change in each micro-batch, and that is no statistic of a "
    "norm, is a warning that names it, and says how it is changed once per mini-batch."
)
def state_of_micro_batches(make):
    layers = layers_of(nn.Linear(4, 4), nn.Sequential(Centre()))
    checked_warning(steps(make, layers, torch.rand(8, 4)), r"buffers: .*1\.0\.centre", "Once")

    def evaluate():
        model = make(layers, loss=mean_of_squares).train(False)
        model.step(torch.rand(8, 4))
        return model

    assert warned(evaluate) == []


@promise("A model that does what it should gets no warning.")
def none_without_need(make):
    x = rows(4)
    quiet = [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.rand(4, 5, 4)),
        (first, arguments(x, NoChunk(["a", "b", "c", "d"]), (1, 2, 3, 4)[:2])),
        (first, arguments(x, {"a": 1, "b": 2, "c": 3, "d": 4}, torch.Size([4, 1]), "text")),
        (first, arguments(x, [None] * 4, (x, x, x, x))),
    ]

    def loss(output):
        return mean_of_squares(output[0] if isinstance(output, tuple) else output)

    for layer, value in make.some(quiet):
        run = steps(make, layers_of(layer, nn.Identity()), value, loss, chunks=2)
        assert (found := warned(run)) == [], found

    def evaluate():
        model = make(layers_of(first, nn.Identity()), loss=loss, chunks=1)
        with torch.no_grad():
            model.step(x)
        model.train(False).step(x)
        return model

    assert warned(evaluate) == []
