"""Memory of each device, counted by its allocator.

The unit is an activation: the output of a layer for one micro-batch. All layers here save one each.
"""

import gc
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.support.helpers import MODES, Scale, assert_no_races, wrap
from tests.virtual.stages import SEEDS, own_streams
from torchgpipe import GPipe
from torchgpipe.devices.pool import StreamPool
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.testing import observe

ROWS, WIDTH = 4, 256
ACTIVATION = ROWS * WIDTH * 4


def promise(mode, m, layers, *, first):
    """The peak of a partition, in activations.

    The first layer saves its input, and the others save their outputs. Without checkpointing, the
    partition keeps all of these. With it, the partition keeps its inputs, and all tensors of one
    micro-batch. The caller holds the inputs of the first partition anyway.
    """
    inputs = 0 if first else m
    return inputs + (layers - 1) * (m if mode == "never" else 1)


def allocated(devices):
    return [torch.accelerator.memory_allocated(device) for device in devices]


def stage(layers):
    return nn.Sequential(Scale(), *[nn.Tanh() for _ in range(layers - 1)])


def verify_peak(devices, modes, m, layers, own=False):
    """Check that a partition keeps what its own mode says, whatever the others do."""
    n = len(modes)
    devices = devices[:n]
    model = wrap([stage(layers) for _ in modes], devices, modes, m)
    x = torch.rand(ROWS * m, WIDTH, device=devices[0])
    for seed in SEEDS[::2]:
        model.zero_grad()
        gc.collect()
        before = allocated(devices)
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        with own_streams(devices, own), observe(jitter=seed) as seen:
            model(x).sum().backward()
        assert_no_races(seen)
        peaks = [
            (torch.accelerator.max_memory_allocated(device) - start) / ACTIVATION
            for device, start in zip(devices, before)
        ]
        for j, (mode, peak) in enumerate(zip(modes, peaks)):
            least = promise(mode, m, layers, first=j == 0)
            # One arrives, one leaves, and one is being differentiated.
            most = least + 3
            # The host of the next device may be ahead, and send its gradients early.
            most += m * (j < n - 1)
            # The outputs of micro-batches, and the joined output.
            most += 2 * m * (j == n - 1)
            assert least <= peak <= most, f"partition {j}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "m", "layers"), [(4, 8, 16), (8, 4, 8), (1, 8, 8)])
@pytest.mark.parametrize("own", [False, True])
def test_peak(devices, n, m, layers, mode, own):
    verify_peak(devices, [mode] * n, m, layers, own)


@pytest.mark.parametrize("mode", MODES)
def test_what_has_left_a_device_is_not_kept_there(devices, mode):
    m = 32
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model = GPipe(nn.Sequential(*layers), [1, 1], devices=devices[:2], chunks=m, checkpoint=mode)
    x = torch.rand(ROWS * m, WIDTH, device=devices[0])
    # The first cell of the first step copies small parameters.
    model(x[:m])
    before = torch.accelerator.memory_allocated(devices[0])
    torch.accelerator.reset_peak_memory_stats(devices[0])
    output = model(x)
    peak = (torch.accelerator.max_memory_allocated(devices[0]) - before) / ACTIVATION
    # A device is ahead of the next one by so many micro-batches at most, and one is a clone.
    assert peak <= StreamPool.COPIES - 1 + 3
    assert output.requires_grad


class Detour(nn.Module):
    """A layer that leaves the device, whose autograd thread is idle meanwhile."""

    def forward(self, x):
        return x.cpu().tanh().to(x.device)


@pytest.mark.parametrize(("n", "requires_grad"), [(1, True), (2, False), (2, True)])
def test_one_micro_batch_is_recomputed_at_a_time(devices, n, requires_grad):
    m, layers = 8, 12
    first = nn.Sequential(Scale()) if n == 2 else nn.Sequential()
    slow = nn.Sequential(stage(layers), Detour(), nn.Tanh())
    model = GPipe(
        nn.Sequential(*first, slow), [1] * n, devices=devices[:n], chunks=m, checkpoint="always"
    )
    x = torch.rand(ROWS * m, WIDTH, device=devices[0], requires_grad=requires_grad)
    before = torch.accelerator.memory_allocated(devices[n - 1])
    torch.accelerator.reset_peak_memory_stats(devices[n - 1])
    model(x).sum().backward()
    peak = torch.accelerator.max_memory_allocated(devices[n - 1]) - before
    # Inputs, outputs, the joined output, and the layers of one micro-batch.
    assert peak / ACTIVATION <= 3 * m + layers + 5


def settled(places):
    """Allocated memory once threads of autograd have freed what came before."""
    found = None
    while found != (found := allocated(places)):
        gc.collect()
        time.sleep(0.02)
    return found


@skippable(stash=["wide"])
class Stash(nn.Module):
    def __init__(self, times=32):
        super().__init__()
        self.times = times

    def forward(self, x):
        yield stash("wide", x.repeat(1, self.times))
        return x


@skippable(pop=["wide"])
class Pop(nn.Module):
    def forward(self, x):
        wide = yield pop("wide")
        return x + wide[:, :WIDTH]


def test_a_skip_is_kept_no_longer_than_it_is_on_its_way(devices):
    n, m = 4, 32
    layers = [Stash(), nn.Tanh(), nn.Tanh(), Pop()]
    model = GPipe(nn.Sequential(*layers), [1] * n, devices=devices[:n], chunks=m)
    x = torch.rand(ROWS * m, WIDTH, device=devices[0])
    before = allocated(devices[:n])
    for device in devices[:n]:
        torch.accelerator.reset_peak_memory_stats(device)
    with torch.no_grad():
        model(x)
    first, *between, last = [
        (torch.accelerator.max_memory_allocated(device) - start) / ACTIVATION
        for device, start in zip(devices, before)
    ]
    # It leaves the first device when the last one takes it, and one is a clone. A device is ahead
    # of another one by one micro-batch less than it has copy streams for them, at most.
    ahead = StreamPool.COPIES - 1
    assert first <= 32 * (ahead + 2) + ahead + 3
    assert all(peak <= ahead + 3 for peak in between)
    assert last <= 32 * 2 + 2 * m + 3


@skippable(stash=["same"])
class StashSame(nn.Module):
    def forward(self, x):
        yield stash("same", x)
        return x


@skippable(pop=["same"])
class PopSame(nn.Module):
    def forward(self, x):
        return x + (yield pop("same"))


def peaks(step, devices):
    """Peak of a step on each device, in activations, after steps that allocate what stays."""
    step()
    before = settled(devices)
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    step()
    return [
        (torch.accelerator.max_memory_allocated(device) - start) / ACTIVATION
        for device, start in zip(devices, before)
    ]


@pytest.mark.parametrize("grad", ["no_grad", "inference_mode", "enable_grad"])
def test_skip_that_is_the_value_too_leaves_as_one(devices, grad):
    layers = [Scale(), StashSame(), PopSame()]
    model = GPipe(nn.Sequential(*layers), [2, 1], devices=devices[:2], chunks=1, checkpoint="never")
    x = torch.rand(ROWS, WIDTH, device=devices[0])
    with getattr(torch, grad)():
        first, _ = peaks(lambda: model(x), devices[:2])
    # The output of the layer, and its clone.
    assert first == 2


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_skip_that_is_the_value_too_are_added_in_place(devices, mode):
    layers = [nn.Tanh(), StashSame(), PopSame()]
    model = GPipe(nn.Sequential(*layers), [2, 1], devices=devices[:2], chunks=1, checkpoint=mode)
    x = torch.rand(ROWS, WIDTH, device=devices[0], requires_grad=True)
    first, _ = peaks(lambda: torch.autograd.grad(model(x).sum(), x), devices[:2])
    # The saved tensor and both gradients; or the gradient that the layer takes and its own.
    assert first == 3


@pytest.mark.parametrize("grad", ["no_grad", "inference_mode", "enable_grad"])
def test_skip_that_is_the_value_too_is_let_go_at_its_last_use(devices, grad):
    layers = [StashSame(), PopSame(), nn.Tanh(), nn.Tanh()]
    model = GPipe(nn.Sequential(*layers), [1, 3], devices=devices[:2], chunks=1)
    x = torch.rand(ROWS, WIDTH, device=devices[0])
    with getattr(torch, grad)():
        _, last = peaks(lambda: model(x), devices[:2])
    # The value, and the input and the output of a layer.
    assert last == 3


@pytest.mark.parametrize("first", [nn.Identity(), nn.ReLU(inplace=True)], ids=["", "in place"])
@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
def test_skip_is_let_go_at_its_last_use_in_a_recomputation(devices, first, hooks):
    k = 8
    layers = [Scale(), Stash(times=1), first, Pop(), *[nn.Tanh() for _ in range(k)]]
    model = GPipe(
        nn.Sequential(*layers), [2, k + 2], devices=devices[:2], chunks=1, checkpoint="always"
    )
    x = torch.rand(ROWS, WIDTH, device=devices[0])

    def step():
        with saved_tensors_hooks(torch.clone, torch.clone) if hooks else nullcontext():
            output = model(x)
        output.sum().backward()

    _, last = peaks(step, devices[:2])
    # The output, what the layers give again, and one gradient; the rest are numbers.
    assert int(last) == k + 2 + isinstance(first, nn.ReLU)


@skippable(pop=["wide"])
class PopAndGoOn(nn.Module):
    """A layer that is done with a skip long before it returns."""

    def __init__(self, rest):
        super().__init__()
        self.rest = rest

    def forward(self, x):
        y = x + (yield pop("wide"))
        del x
        return self.rest(y)


@pytest.mark.parametrize("mode", ["no grad", "never", "always"])
def test_a_layer_that_goes_on_after_its_pop_holds_one_skip_more(devices, mode):
    """The remedy is a layer of its own for what comes after the pop."""
    found = []
    for split in (False, True):
        rest = nn.Sequential(*[nn.Tanh() for _ in range(6)])
        last = [Pop(), rest] if split else [PopAndGoOn(rest)]
        layers = nn.Sequential(Stash(times=1), *last)
        balance, kept = [1, len(last)], "never" if mode == "no grad" else mode
        model = GPipe(layers, balance, devices=devices[:2], chunks=1, checkpoint=kept)
        x = torch.rand(ROWS, WIDTH, device=devices[0], requires_grad=True)

        def step(model=model, x=x):
            with torch.set_grad_enabled(mode != "no grad"):
                output = model(x)
            if mode != "no grad":
                output.sum().backward()

        found.append(int(peaks(step, devices[:2])[1]))
    assert found[0] - found[1] == 1


class Slow(Scale):
    """A layer that makes the host slow in backward."""

    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda _: time.sleep(0.005))
        return y


@pytest.mark.parametrize("j", [0, 1])
def test_gradients_that_nobody_needs_yet_stay_away(devices, j, monkeypatch):
    """However slow the host is in one partition, few gradients come to it early."""
    # Forward is in the order of the clock cycles.
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)
    m, devices = 16, devices[:3]
    layers = [Scale(), Scale(), Scale()]
    layers[j] = Slow()
    model = GPipe(nn.Sequential(*layers), [1] * 3, devices=devices, chunks=m, checkpoint="never")
    loss = model(torch.rand(ROWS * m, WIDTH, device=devices[0])).sum()
    before = torch.accelerator.memory_allocated(devices[j])
    torch.accelerator.reset_peak_memory_stats(devices[j])
    loss.backward()
    more = torch.accelerator.max_memory_allocated(devices[j]) - before
    # The gradient that is used, what the layer makes of it, and two that are early. Or one is, and
    # a clone leaves for the partition before.
    assert more / ACTIVATION < 4.5


@pytest.mark.parametrize(("chunks", "saves"), [(1, True), (2, False), (8, False)])
def test_memory_of_steps_within_backward(chunks, saves, devices):
    """Autograd adds up a parameter's gradients of all micro-batches before it hands them over."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)])
    model = GPipe(module, [8, 8], devices=devices[:2], chunks=chunks)
    weights = 8 * 64 * 64 * 4
    x = torch.rand(8, 64, device=devices[0])

    def peak():
        before = torch.accelerator.memory_allocated(devices[0])
        torch.accelerator.reset_peak_memory_stats(devices[0])
        model(x).sum().backward()
        model.zero_grad()
        return (torch.accelerator.max_memory_allocated(devices[0]) - before) / weights

    peak()
    usual = peak()

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    assert usual > 0.95
    assert (peak() < usual / 2) == saves
