"""Cells whose saved tensors are in the memory of the host: gradients, races, memory and time."""

import gc
from itertools import product

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races, wrap
from tests.support.long_runs import eventually
from tests.support.offload import LAYERS, WIDTH, Attention, Spoiling, stack
from tests.support.size import some
from tests.virtual.stages import SEEDS, own_streams
from tests.virtual.test_memory import ACTIVATION, ROWS, allocated, stage
from torchgpipe import Offload
from torchgpipe.engine.stages import stages_of
from torchgpipe.testing import observe

M = 5


def attention(devices, mode, **options):
    torch.manual_seed(0)
    return wrap([Attention() for _ in range(4)], devices, mode, M, **options)


def trained(model, devices, *, steps=2, jitter=None, **options):
    """The gradients of the last of some steps, and what was observed in it."""
    for k in range(steps):
        model.zero_grad()
        torch.manual_seed(k)
        x = torch.rand(2 * M, 16, 32, device=devices[0])
        with observe(jitter=jitter, **options) as seen:
            model(x).pow(2).mean().backward()
    return [x.grad.cpu() for x in model.parameters()], seen


def memories(model):
    """The memory of the host, by device."""
    return stages_of(model).pool._hosts


def unused(model):
    """The bytes of buffers of the host that nobody uses, by device."""
    each = [[*x._free.items()] for x in memories(model).values()]
    return [sum(size * len(buffers) for size, buffers in found) for found in each]


MODES = {
    "all": "offload",
    "half": Offload(share=0.5),
    "mixed": ["offload", "always", "never", Offload(share=0.3)],
}


@pytest.mark.parametrize(
    ("kind", "n"), some([*product(MODES, [2, 4])], [("half", 2), ("mixed", 4)])
)
def test_gradients_are_the_same_bit_by_bit(devices, kind, n):
    mode = MODES[kind] if n == 4 or kind != "mixed" else ["offload", "except_last"]
    places = devices[:n]
    expected, _ = trained(attention(places, "never"), places)
    model = attention(places, mode)
    for seed in some(SEEDS, SEEDS[:1]):
        found, seen = trained(model, places, jitter=seed)
        assert_no_races(seen)
        assert all(map(torch.equal, found, expected))
    assert seen.transfers[0, "cpu"].bytes > 0


@pytest.mark.parametrize("n", some([2, 3, 4], [4]))
def test_partitions_that_share_a_device(devices, n):
    places = [devices[k // 2] for k in range(n)]
    balance = [4 // n] * (n - 1)
    balance.append(4 - sum(balance))
    expected, _ = trained(attention(places, "never", balance=balance), places)
    model = attention(places, "offload", balance=balance)
    for own in (False, True):
        with own_streams(devices[:n], own):
            found, seen = trained(model, places, jitter=0)
        assert_no_races(seen)
        assert all(map(torch.equal, found, expected))


def step_of(devices, mode, ratio, m=M, layers=8, n=4):
    """The time of a step of F = 7 and B = 14, and the peaks of devices in activations."""
    places = devices[:n]
    model = wrap([stage(layers) for _ in places], places, mode, m)
    x = torch.rand(ROWS * m, WIDTH, device=places[0])
    # What a partition between others saves is an activation for each layer.
    bytes = ACTIVATION * layers / (ratio * (layers - 1))
    links = {link: bytes for k in range(n) for link in ((k, "cpu"), ("cpu", k))}
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        before = allocated(places)
        for device in places:
            torch.accelerator.reset_peak_memory_stats(device)
        with observe(costs={"tanh": 1, "tanh_backward": 2}, bandwidth=links) as seen:
            model(x).sum().backward()
    assert_no_races(seen)
    peaks = map(torch.accelerator.max_memory_allocated, places)
    return seen.makespan, [(peak - old) / ACTIVATION for peak, old in zip(peaks, before)]


def test_copies_are_in_the_timeline_beside_the_cells(devices):
    model = attention(devices[:2], "offload")
    links = {link: 1e5 for k in range(2) for link in ((k, "cpu"), ("cpu", k))}
    _, seen = trained(model, devices, costs={"addmm": 1.0, "mm": 1.0}, bandwidth=links)
    assert_no_races(seen)
    found = {}
    for span in seen.timeline.spans:
        found.setdefault((span.stream.device, span.kind), []).append(span)
    for k in range(2):
        (out,), (back,) = ({x.stream for x in found[k, kind]} for kind in ("out", "back"))
        assert len({out, back, found[k, "F"][0].stream}) == 3
        # Each cell but the last two, in order, and the other way round.
        names = [list(dict.fromkeys(x.name for x in found[k, kind])) for kind in ("out", "back")]
        assert names[0] == [f"{k} out {i}" for i in range(M - 2)]
        assert names[1] == [f"{k} back {i}" for i in reversed(range(M - 2))]
        first = {x.microbatch: x.start for x in reversed(found[k, "out"])}
        ends = {x.microbatch: x.end for x in found[k, "F"]}
        assert all(start >= ends[i] for i, start in first.items())


@pytest.mark.parametrize("ratio", some([0.5, 1, 1.5, 2, 3], [1, 3]))
def test_the_time_of_a_step(devices, ratio):
    """Copies are hidden while that of a cell takes no longer than its forward."""
    never, _ = step_of(devices, "never", ratio)
    assert never == (M + 3) * 21
    forward, backward, copy = 7, 14, 7 * ratio
    late = max(0, copy - forward) + max(0, copy - backward)
    assert step_of(devices, "offload", ratio)[0] == pytest.approx(never + (M - 2) * late)
    late = max(0, copy / 2 - forward) + max(0, copy / 2 - backward)
    half, _ = step_of(devices, Offload(share=0.5), ratio)
    assert half == pytest.approx(never + (M - 2) * late)


@pytest.mark.parametrize("m", some([4, 8, 16], [5, 8]))
def test_the_memory_of_a_step(devices, m):
    """Two cells of eight activations are there at once, however many micro-batches there are."""
    _, peaks = step_of(devices, "offload", 1, m)
    _, never = step_of(devices, "never", 1, m)
    # Beside them are gradients: of outputs, of which some may be early, and of an input.
    assert peaks[1] <= 2 * 8 + 6
    assert never[1] >= 8 * m


@pytest.mark.parametrize("m", [1, 2])
def test_the_last_two_micro_batches_stay(devices, m):
    model = wrap([stage(4), stage(4)], devices[:2], "offload", m)
    with observe() as seen:
        model(torch.rand(ROWS * m, WIDTH, device=devices[0])).sum().backward()
    assert not [link for link in seen.transfers if "cpu" in link]


@pytest.mark.parametrize(("kind", "count"), [("views", 4), ("views of weights", 5)])
def test_each_storage_leaves_once_and_weights_stay(devices, kind, count):
    model = wrap(stack(LAYERS[kind]), devices[:2], "offload", 4, balance=[4, 4])
    with observe() as seen:
        model(torch.rand(8, WIDTH, device=devices[0])).sum().backward()
    # Of two cells: the outputs of both linear layers, of which views are saved, the input of the
    # second one, and two products, which are half as large if their factors are views.
    assert seen.transfers[0, "cpu"].bytes == 2 * count * 2 * WIDTH * 4
    assert seen.transfers["cpu", 0] == seen.transfers[0, "cpu"]


def outcome(layers, devices, mode, use, **options):
    model = wrap(layers, devices[:2], mode, 5, balance=[4, 4])
    torch.manual_seed(1)
    x = torch.rand(20, WIDTH, device=devices[0], requires_grad=True)
    with observe(jitter=0, **options) as seen:
        use(model, x)
    assert_no_races(seen)
    return [y.grad.cpu() for y in (x, *model.parameters())], model, seen


def once(model, x):
    model(x).sum().backward()


def twice(model, x):
    y = model(x).pow(2).sum()
    y.backward(retain_graph=True)
    y.backward()


def double(model, x):
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()


def a_part(model, x):
    x.grad, *_ = torch.autograd.grad(model(x).pow(2).sum(), [x])
    once(model, x)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("use", [once, twice, double, a_part])
def test_layers_that_save_tensors_of_all_sorts(devices, kind, use):
    expected, *_ = outcome(stack(LAYERS[kind]), devices, "never", use)
    found, _, seen = outcome(stack(LAYERS[kind]), devices, "offload", use)
    assert all(map(torch.equal, found, expected))
    assert seen.transfers[1, "cpu"].bytes > 0


def test_what_has_changed_is_an_error(devices):
    for mode in ("never", "offload"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outcome(stack(Spoiling), devices, mode, once)


def test_what_others_hold_stays(devices):
    _, _, seen = outcome(stack(LAYERS["held"]), devices, "offload", once)
    _, _, free = outcome(stack(nn.Tanh), devices, "offload", once)
    rows = 4 * WIDTH * 4
    # Of three cells: what both layers have computed, and the input. The first input is the
    # caller's own, and the others are clones. Where a layer holds an output, the next one saves
    # another tensor.
    assert free.transfers[0, "cpu"].bytes == (2 * 3 + 2) * rows
    assert seen.transfers[0, "cpu"].bytes == (3 + 2) * rows


def test_a_step_leaves_nothing_on_the_device(devices):
    model = wrap(stack(nn.Tanh), devices[:2], "offload", M, balance=[4, 4])
    x = torch.rand(2 * M, WIDTH, device=devices[0])
    gc.collect()
    before = allocated(devices[:2])
    gc.disable()
    try:
        model(x)
        model(x).sum().backward()
        model.zero_grad()
        assert allocated(devices[:2]) == before
    finally:
        gc.enable()


class Failing(nn.Module):
    """A layer that fails in its forward or its backward, when it is told to."""

    def __init__(self):
        super().__init__()
        self.where, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        if self.where == "forward" and self.calls == M - 1:
            raise ZeroDivisionError
        y = x.clone()
        if self.where == "backward" and self.calls == 2:
            y.register_hook(self._fail)
        return y

    def _fail(self, _):
        raise ZeroDivisionError


@pytest.mark.parametrize("where", ["forward", "backward", "no backward"])
def test_a_step_that_fails_leaves_no_buffer_lost(devices, where):
    failing = Failing()
    layers = [Attention(), Attention(), failing, Attention()]
    model = wrap(layers, devices[:2], "offload", M)
    trained(model, devices)
    made = unused(model)
    model.zero_grad()
    gc.collect()
    before = allocated(devices[:2])
    failing.where, failing.calls = where, 0
    with observe(jitter=0) as seen:
        x = torch.rand(2 * M, 16, 32, device=devices[0])
        if where == "no backward":
            model(x)
        else:
            with pytest.raises(ZeroDivisionError):
                model(x).sum().backward()
        failing.where = None
        gc.collect()
        # A thread of autograd's lets go of its part when it ends.
        assert eventually(lambda: unused(model) == made)
        # What was still on its way meets the next step.
        model(x).sum().backward()
    del x
    gc.collect()
    assert_no_races(seen)
    model.zero_grad()
    assert allocated(devices[:2]) == before


def test_a_host_without_pinned_memory(devices, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("no memory left")

    model = attention(devices[:2], "offload")
    monkeypatch.setattr("torchgpipe.devices.pool.pinned", refuse)
    with pytest.raises(
        RuntimeError, match=r"offloading needs pinned .* no memory left.* send less"
    ):
        trained(model, devices)
    monkeypatch.undo()
    trained(model, devices)


def test_the_cpu_beside_an_accelerator_keeps_all(devices):
    places = [torch.device("cpu"), devices[0]]
    expected, _ = trained(attention(places, "never"), places)
    found, seen = trained(attention(places, "offload"), places, jitter=0)
    assert_no_races(seen)
    assert all(map(torch.equal, found, expected))


def test_no_grad_sends_nothing(devices):
    model = attention(devices[:2], "offload")
    x = torch.rand(2 * M, 16, 32, device=devices[0])
    with observe() as seen, torch.no_grad():
        model(x)
    assert not [link for link in seen.transfers if "cpu" in link]
