"""A cell: its lanes, its copies, its checkpoint, and its notes on errors."""

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.helpers import note_of
from torchgpipe.ambient.context import Context
from torchgpipe.autograd import copy as copy_module
from torchgpipe.autograd.copy import Copy, Wait
from torchgpipe.autograd.fork_join import Join, Recompute, fork
from torchgpipe.devices.streams import CPUStream
from torchgpipe.engine import cell as cell_module
from torchgpipe.engine.body import Body
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.step import Fence
from torchgpipe.recompute import checkpoint as checkpoint_module
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.skip import skippable, stash
from torchgpipe.values.microbatch import VALUE, Batch

CPU = torch.device("cpu")


class Numbers(nullcontext):
    """In place of the numbers of a cell, which draws none."""

    after = None
    state, device = torch.get_rng_state(), torch.device("cpu")


def make(layers, *, stream=None, lanes=None, arriving=None, departing=(), checkpoint=False):
    """Make the cell (1, 2) with the streams that a test tells apart."""
    stream, arriving = stream or CPUStream(CPU), arriving or {}
    lanes = lanes or {VALUE: CPUStream(CPU)}
    layers = nn.Sequential(layers)
    state = LayersState(layers, {}) if checkpoint else None
    step = SimpleNamespace(
        stages=SimpleNamespace(
            devices=[CPU] * 3,
            recording=None,
        ),
        lanes=SimpleNamespace(
            compute=[None, None, stream],
            sources=[None, None, dict.fromkeys(arriving, 1)],
            targets=[None, None, dict.fromkeys(departing, 3)],
            lane=lambda i, j, part: lanes[part] if j == 2 else arriving[part],
        ),
        context=Context(),
        numbers=SimpleNamespace(of=lambda i, device: Numbers()),
        bodies=[None, None, Body(layers, nullcontext(), state, first=False)],
        checkpointed=[0, 0, 2 * checkpoint],
    )
    return Cell(step, 1, 2)


def branched(cell, batch):
    """The output after the end of the fence, and the phonies for the next micro-batch."""
    fence = Fence({2: {}})
    return cell.branch(batch, fence, last=False), fence.before(2, 2)


def names(tensor):
    """Names of the autograd functions behind a tensor, the last one first."""
    found, node = [], tensor.grad_fn
    while node is not None:
        found.append(node.name().removesuffix("Backward"))
        node = next((edge for edge, _ in node.next_functions if edge is not None), None)
    return found


class Double(nn.Module):
    def forward(self, x):
        # Checkpointing drops the factor, which autograd saves for backward.
        return x.mul(torch.full_like(x, 2))


@pytest.mark.parametrize("arriving", [{}, {VALUE: CPUStream(CPU)}])
@pytest.mark.parametrize("departing", [[], [VALUE]])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_graph(arriving, departing, checkpoint):
    x = torch.ones(2, requires_grad=True)
    cell = make(Double(), arriving=arriving, departing=departing, checkpoint=checkpoint)
    batch = branched(cell, cell.compute(cell.arrive(Batch(x))))[0]
    arrival = ["Copy", "Wait"] if arriving else []
    departure = ["Recompute"] if checkpoint and departing else ["ExpandBackward0"]
    assert [*arrival, "MulBackward0", *departure] == [
        name for name in reversed(names(batch[0])) if "AccumulateGrad" not in name
    ]
    batch[0].sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_fork_and_join():
    x = torch.ones(2, requires_grad=True)
    cell = make(Double())
    assert cell.merge(Batch(x), [])[0] is x
    batch, phonies = branched(cell, Batch(x * 1))
    assert names(cell.merge(batch, phonies)[0])[0] == "Join"
    assert names(cell.arrive(batch, phonies)[0])[0] == "Join"
    cell = make(Double(), arriving={VALUE: CPUStream(CPU)})
    assert names(cell.arrive(batch, phonies)[0])[0] == "Copy"


def test_structure_is_kept():
    crossing = {"arriving": {VALUE: CPUStream(CPU)}, "departing": [VALUE]}
    cell = make(nn.Identity(), **crossing, checkpoint=True)
    x = torch.ones(2, requires_grad=True)
    for batch in (Batch(x * 1), Batch((x * 1,)), Batch((x * 1, torch.ones(2)))):
        output, phonies = branched(cell, cell.compute(cell.arrive(batch)))
        output = cell.merge(output, phonies)
        assert (output.atomic, len(output)) == (batch.atomic, len(batch))
        assert [t.requires_grad for t in output] == [t.requires_grad for t in batch]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", [KeyError, StopIteration, SystemExit, KeyboardInterrupt])
def test_error_names_the_cell(kind, checkpoint):
    error = kind("x")

    class Fail(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(kind) as caught:
        make(Fail(), checkpoint=checkpoint).compute(Batch(torch.ones(1)))
    assert caught.value is error
    assert note_of(error) == "raised in partition 2, micro-batch 1"


def test_output_that_cannot_pass_names_the_cell():
    @dataclass
    class Pair:
        x: torch.Tensor

    class Make(nn.Module):
        def forward(self, x):
            return Pair(x)

    with pytest.raises(TypeError, match="class: Pair") as caught:
        make(Make()).compute(Batch(torch.ones(1)))
    assert note_of(caught.value) == "raised in partition 2, micro-batch 1"


class Lane(CPUStream):
    """A stream that can be told from others, of a device that has none."""

    def __init__(self, name):
        super().__init__(torch.device("cpu"))
        self.name = name


class Lanes(threading.local):
    """Names of the current streams of a thread, on a CPU that pretends to have streams."""

    def __init__(self):
        self.current = ["caller"]


@pytest.fixture
def lanes(monkeypatch):
    lanes = Lanes()

    class UseLane:
        def __init__(self, lane):
            self.lane = lane

        def __enter__(self):
            lanes.current.append(self.lane.name)

        def __exit__(self, *error):
            lanes.current.pop()

    for module in (cell_module, checkpoint_module, copy_module):
        monkeypatch.setattr(module, "use_stream", UseLane)
    return lanes


@pytest.fixture
def applied(lanes, monkeypatch):
    """A log of the current stream at each call of an autograd function."""
    log = []

    def spy(function):
        apply = function.apply

        def logged(*arguments):
            log.append((function.__name__, lanes.current[-1]))
            return apply(*arguments)

        monkeypatch.setattr(function, "apply", logged)

    for function in (Copy, Wait, Recompute, Join):
        spy(function)

    def logged_fork(tensors):
        log.append(("fork", lanes.current[-1]))
        return fork(tensors)

    monkeypatch.setattr(checkpoint_module, "fork", logged_fork)
    return log


def test_what_stays_on_the_device_stays_on_its_compute_stream(lanes, applied):
    """Layers may add to the gradient in place on the compute stream."""
    cell = make(Double(), stream=Lane("compute"), checkpoint=True)
    phony = torch.empty(0, requires_grad=True)
    batch = cell.arrive(Batch(torch.ones(1, requires_grad=True)), [phony])
    branched(cell, cell.compute(batch))
    assert applied == [("Join", "compute"), ("fork", "compute")]


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("x", x * 3)
        return x.mul(torch.full_like(x, 2))


def test_lanes_of_a_skip_that_stays_while_the_value_leaves(lanes, applied):
    cell = make(
        Stash(),
        stream=Lane("compute"),
        lanes={VALUE: Lane("copy")},
        departing=[VALUE],
        checkpoint=True,
    )
    batch = cell.compute(cell.arrive(Batch(torch.ones(1, requires_grad=True))))
    batch, phonies = branched(cell, batch)
    assert applied == [("Recompute", "copy"), ("fork", "compute")]
    assert len(phonies) == 2
    assert list(batch.parts) == [VALUE, (None, "x")]


def test_a_skip_has_a_lane_of_its_own(lanes, applied):
    cell = make(
        Stash(),
        stream=Lane("compute"),
        lanes={VALUE: Lane("copy"), (None, "x"): Lane("skip")},
        departing=[VALUE, (None, "x")],
        checkpoint=True,
    )
    batch = cell.compute(cell.arrive(Batch(torch.ones(1, requires_grad=True))))
    branched(cell, batch)
    assert applied == [("Recompute", "copy"), ("Recompute", "skip")]


def test_lanes(lanes, applied):
    """An autograd function belongs to the stream that was current when it was applied.

    Were all on the compute stream, it would wait for each gradient when it arrives at the device.
    """
    seen = []

    class Layer(nn.Module):
        def forward(self, x):
            seen.append(lanes.current[-1])
            return x.exp()

    cell = make(
        Layer(),
        stream=Lane("compute"),
        lanes={VALUE: Lane("copy")},
        arriving={VALUE: Lane("prev")},
        departing=[VALUE],
        checkpoint=True,
    )
    phony = torch.empty(0, requires_grad=True)
    batch = cell.arrive(Batch(torch.ones(1, requires_grad=True)), [phony])
    batch, _ = branched(cell, cell.compute(batch))
    assert applied == [("Copy", "copy"), ("Wait", "compute"), ("Recompute", "copy")]
    # The layers compute on the compute stream, and so they do again.
    batch[0].backward()
    assert seen == ["compute", "compute"]
    assert lanes.current == ["caller"]
