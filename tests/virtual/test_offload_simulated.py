"""The simulator and cells that are away: time, copies, and memory of devices and host."""

import gc
from itertools import product

import pytest
import torch
from torch import nn

from tests.support.helpers import Scale, assert_no_races, wrap
from tests.support.offload import Attention
from tests.support.size import some
from torchgpipe import Offload, ScheduledLoss, trace
from torchgpipe.engine.stages import stages_of
from torchgpipe.schedule import Costs, named, simulate
from torchgpipe.show.span import TRIPS
from torchgpipe.testing import observe

M, BLOCKS = 6, 8
#: A block of attention: F = 6, B = 12 and I = 8; and the bytes that leave. The first stage has no
#: gradient of its input, and the caller has that input.
COSTS = {"addmm": 1.0, "mm": 1.0, "bmm": 1.0}
F, B, HALF, BYTES, INPUT = 6, 12, 8, 86016, 4096
PLACES = {"gpipe": [*range(4)], "1f1b": [*range(8)], "zbv": [0, 1, 2, 3, 3, 2, 1, 0]}
MODES = [Offload(), Offload(share=0.5)]


def squares(output):
    return output.pow(2).mean()


def training_of(layers, devices, name, mode):
    places = [devices[k] for k in PLACES[name]]
    model = wrap(layers, places, mode, M, balance=[len(layers) // len(places)] * len(places))
    return model if name == "gpipe" else ScheduledLoss(model, squares, name)


def trained(training, x, **options):
    """The second of two steps, and the peaks of devices in it."""
    devices = [*dict.fromkeys(getattr(training, "model", training).devices)]
    for _ in range(2):
        training.zero_grad()
        gc.collect()
        before = [torch.accelerator.memory_allocated(device) for device in devices]
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        with observe(**options) as seen:
            output = training(x)
            (output if isinstance(training, ScheduledLoss) else squares(output)).backward()
    assert_no_races(seen)
    peaks = map(torch.accelerator.max_memory_allocated, devices)
    return seen, [peak - old for peak, old in zip(peaks, before)]


def hosts(training):
    """The bytes of the host's memory, by device."""
    return [
        sum(x.sizes) for x in stages_of(getattr(training, "model", training)).pool._hosts.values()
    ]


def schedule_of(name):
    workers = max(PLACES[name]) + 1
    return named("fill_drain" if name == "gpipe" else name, workers, M)


def spans(seen, kind):
    """The start and the end of the copies of each cell."""
    found = [x for x in seen.timeline.spans if x.kind == kind]
    assert len(found) == len({x.name for x in found})
    return {(x.stage, x.microbatch): (x.start, x.end) for x in found}


def compare(devices, name, mode, ratio):
    """Check that a step is as the simulator says, and return both."""
    n, per = len(PLACES[name]), BLOCKS // len(PLACES[name])
    rate = BYTES / (F * ratio)
    links = {x: rate for k in range(8) for x in ((k, "cpu"), ("cpu", k))}
    torch.manual_seed(0)
    training = training_of([Attention() for _ in range(BLOCKS)], devices, name, mode)
    x = torch.rand(2 * M, 16, 32, device=devices[0])
    seen, _ = trained(training, x, costs=COSTS, bandwidth=links)
    halves = [0] + [HALF] * (n - 1) if name == "zbv" else [0] * n
    away = [mode.share * (BYTES * per - INPUT * (j == 0)) for j in range(n)]
    report = simulate(
        schedule_of(name),
        Costs(
            F=F * per,
            I=halves,
            W=[B * per - half for half in halves],
            activation=BYTES * per,
            away=away,
            out=[x / rate for x in away],
        ),
    )
    assert seen.makespan == pytest.approx(float(report.makespan))
    for kind, copies in (("out", report.out), ("back", report.back)):
        found = spans(seen, kind)
        assert {*found} == {*copies}
        # Where autograd orders backward, copies back begin when gradients of the cell after have
        # come, and not yet when the one before that cell is done.
        if kind == "out" or name != "gpipe":
            assert all(found[cell] == pytest.approx(copies[cell]) for cell in found)
    return report, training


@pytest.mark.parametrize("ratio", some([1, 1.5, 2, 3], [1.5]))
@pytest.mark.parametrize(
    ("name", "mode"),
    some([*product(PLACES, MODES)], [("gpipe", MODES[1]), ("zbv", MODES[0])]),
    ids=str,
)
def test_times_and_bytes_of_the_host(devices, name, mode, ratio):
    report, training = compare(devices, name, mode, ratio)
    # Buffers have the sizes of storages here, which are powers of two.
    assert hosts(training) == [*report.host]


@pytest.mark.parametrize("name", some(["gpipe", "1f1b"], ["1f1b"]))
def test_a_trace_shows_copies_and_memory_of_the_host(devices, name, tmp_path):
    links = {x: 1e4 for k in range(8) for x in ((k, "cpu"), ("cpu", k))}
    training = training_of([Attention() for _ in range(BLOCKS)], devices, name, "offload")
    x = torch.rand(2 * M, 16, 32, device=devices[0])
    with observe(costs=COSTS, bandwidth=links) as seen, trace(training) as timeline:
        output = training(x)
        (output if isinstance(training, ScheduledLoss) else squares(output)).backward()
    for kind in ("out", "back"):
        own = [x for x in timeline.spans if x.kind == kind]
        found = spans(seen, kind)
        assert len(own) == len(found)
        for x in own:
            assert x.end == pytest.approx(found[x.stage, x.microbatch][1])
            assert x.start == pytest.approx(found[x.stage, x.microbatch][0])
    # The last two workers of 1F1B send nothing.
    assert [*timeline.host.values()] == [x for x in hosts(training) if x]
    (share,) = [x for x in timeline.shares if x.device == "virtual:0"]
    time = sum(x.time for x in timeline.spans if x.kind in TRIPS and x.stage == 0)
    assert share.away == pytest.approx(time / timeline.makespan)
    assert time > 0
    titles = str(timeline).split("\n\n")[2].splitlines()[0]
    assert titles.split()[-6:] == ["host-bound", "offload", "peak", "MiB", "host", "MiB"]
    timeline.svg(tmp_path / "step.svg", simulate(schedule_of(name), Costs(away=1, out=1)).timeline)
    picture = (tmp_path / "step.svg").read_text()
    assert "out to the host" in picture
    assert "0 back 0 from" in picture
    described = training.describe()
    assert [row.host for row in described.rows][:4] == hosts(training)[:4]
    assert "host" in str(described).splitlines()[0].split()


ROWS, WIDTH, LAYERS = 4, 256, 24
#: The bytes of one activation, and how many a worker has besides: tensors of one layer, what is on
#: its way, and sums of gradients.
UNIT, BESIDES = ROWS * WIDTH * 4, 6.5


@pytest.mark.parametrize(
    ("name", "mode"), some([*product(["1f1b", "zbv"], MODES)], [("1f1b", MODES[0])]), ids=str
)
def test_peaks(devices, name, mode):
    """Devices have what the simulator says, and besides what they have where nothing leaves."""
    n = len(PLACES[name])
    layers = [nn.Sequential(Scale(), *[nn.Tanh()] * (LAYERS - 1)) for _ in range(n)]
    training = training_of(layers, devices, name, mode)
    _, peaks = trained(training, torch.rand(ROWS * M, WIDTH, device=devices[0]))
    # The caller has the input of the first stage. W needs the input, and the gradient that came.
    inputs = [0] + [1] * (n - 1)
    kept, pending = [x + LAYERS - 1 for x in inputs], [x + 1 for x in inputs]
    costs = Costs(
        activation=kept,
        pending=pending,
        away=[int(mode.share * x) for x in kept],
    )
    expected = simulate(schedule_of(name), costs).peak
    for found, other in zip(peaks, expected):
        assert other <= found / UNIT <= other + BESIDES
