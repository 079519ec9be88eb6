"""Traces on virtual accelerators: equal to the simulation, and without a trace in the model."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, trace
from torchgpipe.schedule import Costs, fill_drain, named, simulate
from torchgpipe.schedule.rewrite import with_modes
from torchgpipe.testing import Busy, observe

#: Bytes per millisecond: a row of one number takes a quarter of a millisecond.
SLOW = 16


class Kept(nn.Module):
    """Layer that keeps something for backward, which checkpointing computes again."""

    def __init__(self, forward):
        super().__init__()
        self.busy = Busy(forward, 1, 1)

    def forward(self, input):
        return self.busy(input).tanh()


def links(devices):
    return {(a, b): SLOW for a in range(len(devices)) for b in range(len(devices)) if a != b}


def cells(timeline):
    """All that a picture shows of a step."""
    return sorted(
        (x.kind, x.stage, x.microbatch, x.target or 0, float(x.start), float(x.end))
        for x in timeline.step().spans
        if x.time
    )


def costs_of(forwards):
    n = len(forwards)
    return Costs(F=forwards, R=forwards, I=[0] + [1] * (n - 1), W=1, copy=0.25)


def forwards_of(n):
    return [1 + k % 3 / 2 for k in range(n)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fill_drain", "1f1b", "zbh1", "zbv", "interleaved"])
def test_scheduled(devices, name, mode):
    placement = named(name, 3, 6).placement
    forwards = forwards_of(len(placement))
    layers = nn.Sequential(*map(Kept, forwards))
    places = [devices[w] for w in placement]
    model = GPipe(layers, [1] * len(places), devices=places, chunks=6, checkpoint=mode)
    training = ScheduledLoss(model, lambda y: y.mean(), name)
    x = torch.rand(6, 1, device=devices[0])
    with observe(bandwidth=links(devices), jitter=0) as seen, trace(training) as timeline:
        training(x).backward()
    assert_no_races(seen)
    report = simulate(training._plan(6, forward=False).schedule, costs_of(forwards))
    assert cells(timeline) == cells(report.timeline)


@pytest.mark.parametrize("mode", MODES)
def test_gpipe(devices, mode):
    """The order is autograd's, and the fence makes it that of the schedule."""
    n, m = 4, 6
    forwards = forwards_of(n)
    layers = nn.Sequential(*map(Kept, forwards))
    model = GPipe(layers, [1] * n, devices=devices[:n], chunks=m, checkpoint=mode)
    x = torch.rand(m, 1, device=devices[0])
    with observe(bandwidth=links(devices)) as seen, trace(model) as timeline:
        for _ in range(2):
            model(x).sum().backward()
    assert_no_races(seen)
    schedule = fill_drain(n, m)
    program = with_modes(schedule.program, mode, m)
    report = simulate(type(schedule)(schedule.placement, m, program), costs_of(forwards))
    computed, expected = (
        {x[:3]: x[4:] for x in cells(t) if x[0] != "copy"} for t in (timeline, report.timeline)
    )
    # In the last partition, backward asks for the first slot as late as it can.
    assert computed.keys() == expected.keys()
    assert timeline.step().makespan == report.makespan
    if mode == "never":
        assert cells(timeline) == cells(report.timeline)
    assert [x.makespan for x in map(timeline.step, timeline.steps)] == [report.makespan] * 2


@pytest.mark.parametrize("mode", MODES)
def test_mapped(devices, mode):
    """Modules of one visit are one cell, and a device that comes again has another row."""
    model = nn.Sequential(*[Kept(1) for _ in range(6)])
    places = [0, 0, 1, 1, 2, 0]
    device_map = {str(k): devices[w] for k, w in enumerate(places)}
    pipe = MappedGPipe(model, device_map, chunks=4, checkpoint=mode)
    x = torch.rand(4, 1, device=devices[0])
    with observe(jitter=0) as seen, trace(pipe) as timeline:
        pipe(x).sum().backward()
    assert_no_races(seen)
    assert timeline.makespan == seen.makespan
    found = timeline.step().spans
    for kind in "FB" if mode == "never" else "FRB":
        done = {(x.stage, x.microbatch): x.time for x in found if x.kind == kind}
        assert {j for j, _ in done} == {0, 1, 2, 3}
    forwards = [x for x in found if x.kind == "F"]
    assert [x.time for x in forwards if x.stage == 1] == [2] * 4
    assert [x.time for x in forwards if x.stage == 3] == [1] * 4
    rows = {x.stream for x in found if x.computes}
    assert len([x for x in rows if x.device == str(devices[0])]) == 2


@pytest.mark.parametrize("wrapper", [GPipe, MappedGPipe])
def test_input_that_wants_a_gradient(devices, wrapper):
    """Each micro-batch's backward ends by itself, though all of them are of one input."""
    layers = nn.Sequential(Kept(1), Kept(1))
    if wrapper is GPipe:
        model = GPipe(layers, [1, 1], devices=devices[:2], chunks=4, checkpoint="never")
    else:
        model = MappedGPipe(
            layers, {"0": devices[0], "1": devices[1]}, chunks=4, checkpoint="never"
        )
    x = torch.rand(4, 1, device=devices[0], requires_grad=True)
    with observe(bandwidth=links(devices[:2])), trace(model) as timeline:
        model(x).sum().backward()
    first = [x for x in timeline.step().spans if x.kind == "B" and x.stage == 0]
    assert [float(x.time) for x in first] == [2] * 4


def test_graphs(devices):
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model = GPipe(layers, [1] * 3, devices=devices[:3], chunks=4, checkpoint="never")
    training = ScheduledLoss(model, nn.MSELoss(), "zbh1", stages="graph")
    x, y = torch.rand(8, 4, device=devices[0]), torch.rand(8, 4, device=devices[2])
    training(x, y).backward()
    with observe(costs={"addmm": 1, "mm": 1}), trace(training) as timeline:
        training(x, y).backward()
    assert {x.kind for x in timeline.spans if x.computes} == {"F", "I", "W"}
    assert len([x for x in timeline.spans if x.computes]) == 3 * 3 * 4


def test_the_host_is_late(devices):
    """A device without work waits for the host, or for another device."""
    model = GPipe(nn.Sequential(Busy(), Busy()), [1, 1], devices=devices[:2], chunks=8)
    x = torch.rand(8, 1, device=devices[0])
    shares = {}
    for host in (0.0, 0.5):
        with observe(host=host), torch.no_grad(), trace(model) as timeline:
            model(x)
        shares[host] = timeline.shares
    assert [x.host for x in shares[0.0]] == [0, 0]
    assert all(x.host > 0.4 for x in shares[0.5])


def test_measured_costs(devices):
    """Any model has a timeline on virtual accelerators."""
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = GPipe(layers, [2, 2], devices=devices[:2], chunks=4)
    x = torch.rand(64, 64, device=devices[0])
    model(x).sum().backward()
    with observe(costs="measured") as seen, trace(model) as timeline:
        model(x).sum().backward()
    assert {"addmm", "mm"} <= {x.name for x in seen.spans}
    assert timeline.makespan <= seen.makespan
    assert all(x.time > 0 for x in timeline.spans if x.kind in "FB")
    with pytest.raises(ValueError, match="'measured'"), observe(costs="cpu"):
        pass
    with pytest.raises(ValueError, match="issue a piece of work"), observe(host=-1):
        pass


def test_memory(devices):
    layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model = GPipe(layers, [1, 1], devices=devices[:2], chunks=4, checkpoint="never")
    x = torch.rand(64, 256, device=devices[0])
    with trace(model) as timeline:
        model(x).sum().backward()
    for device in devices[:2]:
        assert timeline.memory[str(device)] == torch.accelerator.max_memory_allocated(device)
        assert timeline.memory[str(device)] > 2 * 4 * 256 * 256
    assert "peak MiB" in str(timeline)


@pytest.mark.parametrize("scheduled", [False, True])
def test_description_after_a_trace(devices, scheduled):
    """Times of each partition, and the memory of its device."""
    layers = nn.Sequential(*[Kept(k + 1) for k in range(3)])
    model = GPipe(layers, [1, 1, 1], devices=devices[:3], chunks=4, checkpoint="always")
    wrapper = ScheduledLoss(model, lambda y: y.mean(), "zbh1") if scheduled else model
    x = torch.rand(4, 1, device=devices[0])
    with observe(jitter=0), trace(wrapper) as timeline:
        for _ in range(2):
            loss = wrapper(x) if scheduled else model(x).sum()
            loss.backward()
    found = wrapper.describe()
    assert found.measured == pytest.approx(timeline.step().makespan / 1000)
    assert [row.forward for row in found.rows] == pytest.approx([0.001, 0.002, 0.003])
    again = [0.001, 0.002, 0.003]
    if scheduled:
        # The loss's stage computes nothing again that is kept anyway.
        assert found.rows[0].recompute == pytest.approx(0.001)
    else:
        assert [row.recompute for row in found.rows] == pytest.approx(again)
    # The first partition has no gradient of its input to compute.
    assert [row.backward for row in found.rows] == pytest.approx([0.001, 0.002, 0.002])
    memory = [timeline.memory[str(device)] for device in devices[:3]]
    assert [row.memory for row in found.rows] == memory
    assert "recompute ms" in str(found)


def test_nothing_is_left_behind(devices):
    layers = nn.Sequential(Kept(1), Kept(1))
    model = GPipe(layers, [1, 1], devices=devices[:2], chunks=2)
    x = torch.rand(2, 1, device=devices[0])
    with trace(model):
        output = model(x)
        recording = weakref.ref(model._stages.recording)
        with pytest.raises(RuntimeError, match="traced already"), trace(model):
            pass
    # Backward runs after the block: what it would have recorded is lost, and nothing else.
    output.sum().backward()
    assert all(x.grad is not None for x in model.parameters())
    del output
    gc.collect()
    assert recording() is None
    with trace(model) as timeline:
        pass
    assert timeline.spans == []


def test_a_step_that_fails(devices):
    class Failing(nn.Module):
        def forward(self, input):
            raise ValueError("no")

    model = GPipe(nn.Sequential(Busy(), Failing()), [1, 1], devices=devices[:2], chunks=2)
    with pytest.raises(ValueError, match="no"), trace(model) as timeline:
        model(torch.rand(2, 1, device=devices[0]))
    assert {x.kind for x in timeline.spans} <= {"F", "copy"}
    assert model._stages.recording is None


@pytest.mark.parametrize("mode", MODES)
def test_cells_on_the_cpu_come_one_after_another(mode):
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=mode)
    with trace(model) as timeline:
        for _ in range(2):
            model(torch.rand(8, 8)).sum().backward()
    spans = sorted((x.start, x.end) for x in timeline.spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    found = {(x.step, x.stage, x.microbatch) for x in timeline.spans if x.kind == "B"}
    assert len(found) == 24
    assert len({x.stream for x in timeline.spans}) == 3


def test_only_wrapped_models():
    with pytest.raises(TypeError, match="wrap it first"), trace(nn.Linear(1, 1)):
        pass


def test_a_model_within_another(devices):
    model = GPipe(nn.Sequential(Busy(), Busy()), [1, 1], devices=devices[:2], chunks=2)
    outer = nn.Sequential(nn.Identity(), model)
    with trace(outer) as timeline:
        outer(torch.rand(2, 1, device=devices[0])).sum().backward()
    assert len([x for x in timeline.spans if x.computes]) == 8
