"""Labels of spans: each operator of a wrapper has the name of its layer, and its cell."""

import gc
import json
import sys
import weakref
from collections import Counter, OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import MODES, assert_no_races
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, trace
from torchgpipe.ambient import labels
from torchgpipe.testing import observe

COSTS = {"addmm": 2.0, "mm": 1.0, "tanh": 0.5, "tanh_backward": 0.5}
M = 4


class Block(nn.Module):
    """Layer with operators of its own, of which one adds two gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


def links(devices):
    return {(a, b): 64 for a in range(len(devices)) for b in range(len(devices)) if a != b}


def layers():
    return nn.Sequential(
        OrderedDict(first=nn.Linear(4, 4), block=Block(), third=nn.Linear(4, 4), last=Block())
    )


#: The partition of each layer, and the layer's class.
PLACES = {
    "first": (0, "Linear"),
    "block": (0, "Block"),
    "third": (1, "Linear"),
    "last": (2, "Block"),
}


def gpipe(devices, mode="never"):
    return GPipe(layers(), [2, 1, 1], devices=devices[:3], chunks=M, checkpoint=mode)


def wrapped(devices, kind, mode):
    """A wrapped model, and a function that runs a step of it."""
    x = torch.rand(2 * M, 4, device=devices[0], requires_grad=kind != "mapped")
    if kind == "mapped":
        places = {name: devices[j] for name, (j, _) in PLACES.items()}
        model = MappedGPipe(layers(), places, chunks=M, checkpoint=mode)
        return model, lambda: model(x).sum().backward()
    model = gpipe(devices, mode)
    if kind == "gpipe":
        return model, lambda: model(x).sum().backward()
    training = ScheduledLoss(model, lambda y: y.mean(), kind)
    return training, lambda: training(x).backward()


KINDS = ["gpipe", "1f1b", "zbh1", "mapped"]


def computed(seen, op):
    """The layers and cells that ran an operator, with how often."""
    return Counter(
        (x.kind, x.stage, x.microbatch, x.layer, x.layer_type) for x in seen.spans if x.name == op
    )


def expected(kind, count=1, micro=range(M)):
    return Counter(
        {(kind, j, i, name, of): count for name, (j, of) in PLACES.items() for i in micro}
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_cells(devices, kind, mode):
    _, step = wrapped(devices, kind, mode)
    with observe(costs=COSTS, bandwidth=links(devices), jitter=0) as seen:
        step()
    assert_no_races(seen)
    found = computed(seen, "addmm")
    assert Counter({x: n for x, n in found.items() if x[0] == "F"}) == expected("F")
    again = {x[:3] for x in found if x[0] == "R"}
    assert bool(again) == (mode != "never")
    named = {(x[0], x[3], x[1], x[4]) for x in found}
    assert {x[1:] for x in named} == {(name, *place) for name, place in PLACES.items()}
    # One product is for the input, and another one for the weight.
    halves = expected("I") + expected("W") if kind == "zbh1" else expected("B", 2)
    if kind == "mapped":
        # Nobody needs the gradient of the data.
        halves -= Counter(("B", 0, i, "first", "Linear") for i in range(M))
    assert computed(seen, "mm") == halves
    assert {x.kind for x in seen.spans if x.name == "tanh_backward"} <= set("BIW")
    copies = Counter((x.stage, x.target, x.microbatch) for x in seen.spans if x.kind == "copy")
    ways = [(0, 1), (1, 2), (1, 0), (2, 1)]
    assert copies == Counter((j, k, i) for j, k in ways for i in range(M))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_change_nothing(devices, kind, mode, monkeypatch):
    """The same work, on the same streams, at the same times, whether it has labels or not."""
    found = []
    for labelled in (True, False):
        torch.manual_seed(0)
        model, step = wrapped(devices, kind, mode)
        step()
        with monkeypatch.context() as patch:
            if not labelled:
                patch.setattr(sys.modules[observe.__module__], "labels", SimpleNamespace())
            with observe(costs=COSTS | {"add": 0.25}, bandwidth=links(devices), host=0.125) as seen:
                step()
        assert any(x.layer for x in seen.spans) == labelled
        assert_no_races(seen)
        # Autograd's threads compute a cell again sooner or later. Lanes come from a pool, in turns.
        fixed = kind != "gpipe" or mode == "never"
        spans = Counter(
            (x.stream.device, x.stream.number == 0, x.name, x.start if fixed else 0, x.time)
            for x in seen.spans
        )
        grads = [x.grad.cpu().tolist() for x in model.parameters()]
        found.append((seen.makespan, spans, seen.transfers, grads))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(devices, kind):
    model, step = wrapped(devices, kind, "except_last")
    with observe() as seen:
        step()
        assert labels.observer is not None
    assert labels.observer is labels.current.label is None
    model = weakref.ref(model)
    del step
    gc.collect()
    assert model() is None
    assert seen.spans == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeline_is_that_of_a_trace(devices, kind):
    model, step = wrapped(devices, kind, "never")
    step()
    with observe(costs=COSTS, bandwidth=links(devices)) as seen, trace(model) as timeline:
        step()

    def cells(spans):
        return sorted(
            (x.name, x.stream.device_name, x.start, x.end) for x in spans if x.kind and x.time
        )

    assert cells(seen.timeline.spans) == cells(timeline.spans)
    assert seen.timeline.makespan == seen.makespan
    assert f"step of {seen.makespan:.6g} ms" in str(seen.timeline)


def test_pictures(devices, tmp_path):
    _, step = wrapped(devices, "gpipe", "always")
    with observe(costs=COSTS, bandwidth=links(devices)) as seen:
        step()
    text = str(seen.timeline)
    rows = [line for line in text.splitlines() if line.startswith("virtual:") and "%" not in line]
    assert len(rows) == 3
    assert all(f"{kind}{i}" in text for kind in "FRB" for i in range(M))
    seen.timeline.svg(tmp_path / "step.svg")
    assert "2B3" in (tmp_path / "step.svg").read_text()
    seen.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {x["name"]: x["args"] for x in events if x["ph"] == "X"}
    assert "0F1 first (Linear) addmm" in names
    assert "2B0 last (Block) mm" in names
    assert names["2B0 last (Block) mm"]["layer"] == "last"
    assert "0 to 1 3 copy to virtual:1" in names
    start = "0R2 first (Linear) addmm on stream 0 of virtual:0 from "
    assert any(str(x).startswith(start) for x in seen.spans)


def test_names_of_a_device_map(devices):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.decoder = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            for layer in (*self.encoder, *self.decoder):
                x = layer(x).tanh()
            return x.mean()

    places = {"encoder.0": devices[0], "encoder.1": devices[1], "decoder": devices[0]}
    pipe = MappedGPipe(Model(), places, chunks=2)
    with observe(costs=COSTS) as seen:
        pipe(torch.rand(4, 4, device=devices[0])).mean().backward()
    found = {(x.kind, x.stage, x.layer) for x in seen.spans if x.name == "addmm"}
    assert {x for x in found if x[0] == "F"} == {
        ("F", 0, "encoder.0"),
        ("F", 1, "encoder.1"),
        ("F", 2, "decoder.0"),
    }
    # Code between the modules is part of the cell, and of no layer.
    found = {(x.stage, x.layer) for x in seen.spans if x.name == "tanh" and x.kind == "F"}
    assert found == {(0, ""), (1, ""), (2, "")}
    found = {(x.kind, x.stage, x.layer) for x in seen.spans if x.name == "tanh_backward"}
    assert found == {("B", 0, ""), ("B", 1, ""), ("B", 2, "")}


def test_a_plain_model_has_operators(devices):
    model = layers().to(devices[0])
    with observe(costs=COSTS) as seen:
        model(torch.rand(2, 4, device=devices[0])).sum().backward()
    assert {x.name for x in seen.spans} == {*COSTS}
    assert {(x.kind, x.stage, x.microbatch, x.layer) for x in seen.spans} == {("", None, None, "")}
    assert {x.title for x in seen.spans} == {*COSTS}
    assert seen.timeline.spans == []


@pytest.mark.parametrize("kind", ["gpipe", "mapped"])
def test_sums_of_gradients(devices, kind):
    """An operator that adds gradients up belongs to the layer whose gradient it is."""
    _, step = wrapped(devices, kind, "never")
    with observe(costs={"add": 1.0}) as seen:
        step()
    sums = [x for x in seen.spans if x.kind == "B"]
    # Weights and biases, from the second micro-batch on; and in each block the two ways.
    found = Counter((x.stage, x.layer) for x in sums)
    assert found[1, "third"] == 2 * (M - 1)
    assert found[0, "first"] == 2 * (M - 1)
    assert found[0, "block"] == 2 * (M - 1) + M
    assert {x.kind for x in seen.spans if x.layer} <= set("FB")


def test_a_checkpoint_within_a_layer(devices):
    class Again(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    stack = nn.Sequential(Again(), Again())
    model = GPipe(stack, [1, 1], devices=devices[:2], chunks=2, checkpoint="never")
    with observe(costs=COSTS) as seen:
        model(torch.rand(4, 4, device=devices[0])).sum().backward()
    found = {(x.kind, x.stage, x.layer) for x in seen.spans}
    assert found == {("F", 0, "0"), ("F", 1, "1"), ("B", 0, "0"), ("B", 1, "1")}


def test_graphs_have_cells_and_no_layers(devices):
    stack = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model = GPipe(stack, [1] * 3, devices=devices[:3], chunks=M, checkpoint="never")
    training = ScheduledLoss(model, nn.MSELoss(), "zbh1", stages="graph")
    x, y = torch.rand(8, 4, device=devices[0]), torch.rand(8, 4, device=devices[2])
    training(x, y).backward()
    with observe(costs=COSTS) as seen:
        training(x, y).backward()
    assert {x.kind for x in seen.spans} == {"F", "I", "W"}
    assert {x.cell for x in seen.spans} >= {f"{j}F{i}" for j in range(3) for i in range(M)}
    assert {x.layer for x in seen.spans} == {""}


def test_micro_batches_in_several_threads(devices):
    places = {name: devices[j] for name, (j, _) in PLACES.items()}
    pipe = MappedGPipe(layers(), places, chunks=M, checkpoint="never", threads=2)
    x = torch.rand(2 * M, 4, device=devices[0])
    for _ in range(2):
        with observe(costs=COSTS, jitter=0) as seen:
            pipe(x).sum().backward()
        assert computed(seen, "addmm") == expected("F")
        assert not [x for x in seen.spans if not x.kind]


def test_a_loss_has_a_name(devices):
    training = ScheduledLoss(gpipe(devices), nn.MSELoss(), "1f1b")
    x, y = torch.rand(8, 4, device=devices[0]), torch.rand(8, 4, device=devices[2])
    with observe(costs={"mse_loss": 1.0, "mse_loss_backward": 1.0}) as seen:
        training(x, y).backward()
    assert {(x.name, x.kind, x.layer, x.layer_type) for x in seen.spans} == {
        ("mse_loss", "F", "loss", "MSELoss"),
        ("mse_loss_backward", "B", "loss", "MSELoss"),
    }


def test_a_forward_before_the_observation(devices):
    """Nobody has said which layer the nodes of its backward belong to."""
    model = gpipe(devices, "always")
    output = model(torch.rand(2 * M, 4, device=devices[0]))
    with observe(costs=COSTS) as seen:
        output.sum().backward()
    assert {x.title for x in seen.spans if x.name in ("mm", "addmm")} == {"mm", "addmm"}
    assert str(seen.timeline).startswith("no cells")
    with observe(costs=COSTS) as seen:
        output = model(torch.rand(2 * M, 4, device=devices[0]))
    with observe(costs=COSTS) as later:
        output.sum().backward()
    # The recomputations know their layers anyway.
    assert {x.kind for x in later.spans if x.name == "addmm"} == {"R"}
    assert {x.title for x in later.spans if x.name == "mm"} == {"mm"}
    assert {x.kind for x in seen.spans} == {"F"}


class Racy(nn.Module):
    """Layer whose result is read before it is there."""

    def __init__(self, stream):
        super().__init__()
        self.stream = [stream]

    def forward(self, x):
        y = torch.zeros_like(x)
        with self.stream[0]:
            y.fill_(1)
        return x * y


def test_races_have_names(devices):
    stack = nn.Sequential(nn.Linear(4, 4), Racy(torch.Stream(devices[1])))
    model = GPipe(stack, [1, 1], devices=devices[:2], chunks=2)
    with observe() as seen, torch.no_grad():
        model(torch.rand(4, 4, device=devices[0]))
    race = next(x for x in seen.races if x.kind == "read after write")
    assert race.first.work == race.second.work == "1F0 1 (Racy)"
    assert "fill_ in 1F0 1 (Racy) writes on" in str(race)
    # The same operators on the same streams are one race, whatever the micro-batch.
    assert race.count == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails(devices, kind):
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    if kind == "mapped":
        stack = nn.Sequential(nn.Linear(4, 4), Failing())
        run = MappedGPipe(stack, {"0": devices[0], "1": devices[1]}, chunks=2)
    else:
        stack = nn.Sequential(nn.Linear(4, 4), Failing())
        run = GPipe(stack, [1, 1], devices=devices[:2], chunks=2)
        if kind != "gpipe":
            run = ScheduledLoss(run, lambda y: y.mean(), kind)
    x = torch.rand(4, 4, device=devices[0])
    with observe(costs=COSTS | {"fill": 1.0}) as seen:
        with pytest.raises(ValueError, match="no"):
            run(x)
        assert labels.current.label is None
        before = len(seen.spans)
        x.fill_(1)
    assert seen.spans[before].title == "fill_"
