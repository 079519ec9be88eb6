"""Profiling: the measures, a model that is left as found, and the table."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.support.helpers import note_of
from tests.support.skips import Pop
from torchgpipe import plan
from torchgpipe.balance.profile import (
    Profile,
    detach,
    layerwise_sandbox,
    profile_layers,
)
from torchgpipe.planner import sandbox
from torchgpipe.planner.layers import Layer, Line, Weights
from torchgpipe.planner.sandbox import Figures
from torchgpipe.skip import skippable, stash
from torchgpipe.values.microbatch import Batch


class Row(NamedTuple):
    """The figures of a layer, in seconds and bytes."""

    name: str
    forward: float
    backward: float
    parameters: int
    activations: float
    output: float


def rows(module, *sample, timeout=0, **options):
    profile = profile_layers(module, *sample, timeout=timeout, device="cpu", **options)
    found = []
    for layer in profile.layers:
        figures = layer.at(profile.rows)
        seconds = figures.forward / 1000, figures.backward / 1000
        sizes = layer.weights.parameters, figures.left, figures.output
        found.append(Row(layer.name, *seconds, *sizes))
    return found


class Merge(nn.Module):
    def forward(self, value):
        x, y = value
        return x + y


def test_sizes():
    module = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.ReLU(inplace=True), nn.Tanh(), nn.Identity(), nn.Dropout()
    )
    found = rows(module, torch.rand(10, 4))
    assert [layer.parameters for layer in found] == [4 * 6 * 4, 0, 0, 0, 0]
    assert [layer.output for layer in found] == [10 * 6 * 4] * 5
    # In place nothing is made, nor where the input is passed on; dropout keeps a mask besides.
    assert [layer.activations for layer in found[:4]] == [240, 0, 240, 0]
    assert found[4].activations > 240
    assert [layer.name for layer in found][:2] == ["0 (Linear)", "1 (ReLU)"]


def test_what_is_kept_but_not_saved_is_counted():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.double()
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Layer(nn.Module):
        def forward(self, x):
            return Keep.apply(x)

    (found,) = rows(nn.Sequential(Layer()), torch.rand(10, requires_grad=True))
    assert found.activations == 10 * 4 + 10 * 8


def test_skips_that_pass_by_cost_nothing(clock):
    """The profile does not differentiate such skips, since the stashing layer does."""

    @skippable(stash=["skip"])
    class StashSlow(nn.Module):
        def __init__(self):
            super().__init__()
            self.slow = clock.layer(1.0)

        def forward(self, x):
            yield stash("skip", self.slow(x))
            return x * 1

    module = nn.Sequential(StashSlow(), clock.layer(2.0), Pop())
    found = rows(module, torch.rand(3, requires_grad=True))
    assert [(layer.forward, layer.backward) for layer in found] == [(1, 3), (2, 6), (0, 0)]
    assert [layer.activations for layer in found] == [24, 12, 12]


def test_error_names_the_layer():
    class Fail(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        rows(nn.Sequential(nn.ReLU(), Fail()), torch.rand(1))
    assert note_of(caught.value) == "raised while layer 1 (Fail) was profiled"


def test_layer_that_needs_no_gradient():
    frozen = nn.Linear(3, 3).requires_grad_(False)
    first, second, third = rows(nn.Sequential(frozen, nn.Linear(3, 3), frozen), torch.rand(2, 3))
    assert first.backward == 0
    assert second.backward > 0
    # It has none of its own, but lets one through.
    assert third.backward > 0


def test_all_is_left_as_found(device):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()).to(device)
    module[0].weight.grad = kept = torch.ones(3, 3, device=device)
    state = copy.deepcopy(module.state_dict())
    sample = torch.rand(4, 3, device=device, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2, device=device)
    torch.manual_seed(3)
    profile_layers(module, sample, timeout=0, device=device)
    assert all(map(torch.equal, expected, (torch.rand(2), torch.rand(2, device=device))))
    assert module[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(3, 3, device=device))
    assert module[0].bias.grad is sample.grad is None
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_one_copy_is_on_the_device_at_a_time():
    """The model may therefore be larger than the device."""
    alive = []

    class Watched(nn.Linear):
        count = 0

        def __deepcopy__(self, memo):
            Watched.count += 1
            alive.append(Watched.count)
            return Watched(2, 2)

        def __del__(self):
            Watched.count -= 1

    module = nn.Sequential(*[Watched(2, 2) for _ in range(3)])
    Watched.count = 0
    found = rows(module, torch.rand(1, 2))
    assert [layer.parameters for layer in found] == [24] * 3
    assert all(layer.forward > 0 for layer in found)
    # One copy goes when the next one is there.
    assert len(alive) == 3
    assert max(alive) <= 2
    Watched.count = 3


def test_train_mode():
    """Dropout keeps a mask in training alone."""
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).train()
    module[1].eval()
    expected = rows(copy.deepcopy(module).train(), torch.rand(10, 4))
    for mode in (True, False):
        module[0].train(mode)
        found = rows(module, torch.rand(10, 4))
        assert [x.activations for x in found] == [x.activations for x in expected]
        assert [x.training for x in module.modules()] == [True, mode, False, False]


class Clock:
    """A clock on which each layer takes the time it declares, and nothing else takes any."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("torchgpipe.planner.sandbox.monotonic", lambda: self.now)
        monkeypatch.setattr("torchgpipe.devices.recorder.perf_counter", lambda: self.now)

    def layer(self, *seconds):
        """A layer that takes these times in turn, and three times as long in backward."""
        clock = self
        times = list(seconds)

        class Tick(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.time = times.pop(0) if len(times) > 1 else times[0]
                clock.now += ctx.time
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                clock.now += 3 * ctx.time
                return grad

        class Layer(nn.Module):
            def forward(self, x):
                return Tick.apply(x)

        return Layer()

    def layers(self, *costs):
        module = nn.Sequential(*[self.layer(cost) for cost in costs])
        object.__setattr__(module, "clock", self)
        return module


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(monkeypatch)
    # Layers are copied, the clock is not.
    monkeypatch.setattr(sandbox, "deepcopy", lambda layer: layer)
    return clock


def test_quartiles_after_a_warm_up(clock):
    # One time for a warm-up, and one for the memory. Then each round runs the layer twice.
    pairs = [[7, x] for x in (5, 1, 6, 70, 7, 8, 9, 4)]
    layer = clock.layer(100, 100, *sum(pairs, []))
    timeout = 4 * sum(map(sum, pairs)) - 1
    (found,) = rows(nn.Sequential(layer), torch.rand(1, requires_grad=True), timeout=timeout)
    assert (found.forward, found.backward) == (4, 12)


def test_memory_alone(clock):
    module = nn.Sequential(clock.layer(1.0), nn.Linear(3, 3))
    found = rows(module, torch.rand(2, 3), timeout=None)
    assert [(x.forward, x.backward) for x in found] == [(0, 0)] * 2
    assert [x.output for x in found] == [24] * 2
    # Each layer is warm before it runs to see what it keeps.
    assert clock.now == 2


def test_table():
    def layer(name, forward, backward, parameters, left, output):
        times = 1000 * forward, 1000 * backward
        figures = Figures(*times, output=output, left=left)
        lines = [Line(0.0, x) for x in figures]
        return Layer(name, Weights(parameters=parameters), {}, [], lines)

    layers = [
        layer("0 (Linear)", 0.0012345, 0.002, 1536, 10, 0),
        layer("head", 1.0, 0.0, 3 * 1024**3, 5 * 1024**2, 1023),
    ]
    assert str(Profile(torch.device("cpu"), 1, layers)).split("\n") == [
        "layer       forward ms  backward ms  parameters  activations  output",
        "0 (Linear)       1.234        2.000     1.5 KiB         10 B     0 B",
        "head          1000.000        0.000     3.0 GiB      5.0 MiB  1023 B",
    ]


def test_progress(clock, capsys):
    """One bar over the layers."""
    pytest.importorskip("tqdm")
    module = nn.Sequential(*[clock.layer(1.0) for _ in range(2)])
    x = torch.rand(1, requires_grad=True)
    profile_layers(module, x, timeout=0, device="cpu", progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "\n" not in shown.rstrip("\n")
    profile_layers(module, x, timeout=0, device="cpu")
    assert capsys.readouterr().err == ""


def test_sandbox(device):
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())).eval()
    module[0].weight.grad = torch.ones(2, 2)
    first, second = layerwise_sandbox(module, device)
    assert first.weight.device == device
    assert first.weight is not module[0].weight
    assert first.weight.grad is None
    assert torch.equal(first.weight.cpu(), module[0].weight.cpu())
    assert all(x.training for x in [*first.modules(), *second.modules()])
    assert not any(x.training for x in module.modules())


def test_detach():
    """A public project measures layers by these two functions."""
    batch = Batch((torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)))
    for layer in layerwise_sandbox(nn.Sequential(Merge(), nn.Linear(3, 3)), torch.device("cpu")):
        detach(batch)
        assert all(x.grad_fn is None for x in batch)
        assert batch.requires_grad
        batch = batch.call(layer)
    values = list(Batch((torch.ones(1, requires_grad=True).exp(), torch.ones(1))))
    batch = Batch(tuple(values))
    detach(batch)
    assert [(x.requires_grad, x.is_leaf) for x in batch] == [(True, True), (False, True)]
    assert values[0].grad_fn is not None


def test_no_layers():
    """A profile without layers is empty, and a plan of none is an error."""
    x = torch.rand(2, 3)
    assert profile_layers(nn.Sequential(), x, device="cpu").layers == []
    with pytest.raises(ValueError, match="layers must take time"):
        plan(nn.Sequential(), x, devices=["cpu"] * 2)
